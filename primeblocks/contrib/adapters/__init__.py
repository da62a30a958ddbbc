"""Adapters that have not run against their package. Import each adapter by its own name."""
