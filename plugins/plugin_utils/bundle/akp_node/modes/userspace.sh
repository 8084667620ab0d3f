# shellcheck shell=sh disable=SC3043
# ---------------------------------------------------------------- Mode userspace
# Bundles of this mode can be rendered and compared, but not applied.
userspace_refuse() { die 3 "mode userspace cannot be applied yet: bundles of it are for akp render and akp diff"; }
userspace_shapes() { userspace_refuse; }
userspace_read() { userspace_refuse; }
