"""Record the origin of a result: source code, versions and machine."""
