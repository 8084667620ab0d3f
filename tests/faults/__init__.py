"""Faults at every step of the node program, and what the kernel and its Services are like afterwards."""
