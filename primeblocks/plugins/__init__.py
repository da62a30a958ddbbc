"""Entry points of host packages."""
