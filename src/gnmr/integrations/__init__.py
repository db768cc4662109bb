"""Thin adapters from trainers to the guard; import the one that you use."""
