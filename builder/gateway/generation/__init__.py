"""One call of a model that generates, which every API of the gateway shares: fields, inputs, pieces, what they say."""
