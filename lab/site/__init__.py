"""Hooks of mkdocs, which build the site."""
