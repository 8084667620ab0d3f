"""The node program on real kernels, in throw-away network namespaces."""
