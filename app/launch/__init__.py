"""`trivet up`: which processes a topology needs, and a supervisor that starts, watches and stops them."""
