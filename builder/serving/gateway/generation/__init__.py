"""One call of a generating model, shared by every API of the gateway: fields, inputs, pieces and their meaning."""
