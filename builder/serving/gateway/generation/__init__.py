"""Call a generating model, for every API of the gateway: convert fields to inputs, and pieces to answers."""
