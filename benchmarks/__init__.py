"""Long tests and measurements that are not part of the package."""
