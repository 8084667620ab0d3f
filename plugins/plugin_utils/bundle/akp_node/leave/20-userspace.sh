# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# include tools/userspace.sh
# ---------------------------------------------------------------- Leaving userspace
# True if proxies of ours are there, or their files.
leave_userspace_present() { [ -e "$PROXY" ]; }

leave_userspace() {
    local name
    for name in $PROXIES; do proxy_stop "$name" || return 1; done
    rm -rf "$PROXY"
}

# The rules are those of iptables.
userspace_remember() { iptables_remember "$1"; }
userspace_keep() { iptables_keep "$1"; }
userspace_back() { iptables_back "$1"; }
userspace_features() { iptables_features; }
