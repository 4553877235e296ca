"""What a worker's engine says of its KV cache, brought to where routers see it."""
