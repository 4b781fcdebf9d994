"""The parameter server: shards of the parameters with their optimizer, and the workers' lines to them."""
