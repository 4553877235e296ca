"""Routing simulated: the real router and a real Redis, engines that are modelled."""
