"""The worker side: stages, engine, and the pool that runs them."""
