"""A double of the debug tool: it registers features, and asks the one that is configured."""
