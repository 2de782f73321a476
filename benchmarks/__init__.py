"""Measurements that compare scalerun with other ways to do the same work."""
