# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# ---------------------------------------------------------------- userspace: its proxies
# HAProxy for TCP and nginx for UDP, as the distribution has them. systemd runs them where it is init, by units of ours that need no
# root; elsewhere they are daemons that give up root once they have begun. They read files here, and know nothing else.
PROXY=${AKP_PROXY:-/run/akp-userspace}
PROXIES='haproxy nginx'

by_systemd() { [ -d /run/systemd/system ] && [ -z "${AKP_PROXY:-}" ]; }

# reply is where proxy $1 may write, its sockets and its pid; its unit.
proxy_directory() { if by_systemd; then proxy_unit "$1"; reply=/run/${reply%.service}.d; else reply=$PROXY/run; fi; }
proxy_unit() { case $1 in haproxy) reply=akp-userspace.service ;; *) reply=akp-userspace-udp.service ;; esac; }

# True if proxy $1 runs; reply is its process.
proxy_runs() {
    local name is
    proxy_directory "$1"
    { read -r reply <"$reply/$1.pid"; } 2>/dev/null || return 1
    case $reply in '' | *[!0-9]*) return 1 ;; esac
    { read -r _ name is _ <"/proc/$reply/stat"; } 2>/dev/null && [ "$name" = "($1)" ] && [ "$is" != Z ]
}

# End the workers that proxy $1 left when it was killed: those of nginx live on, and have its ports.
proxy_orphans() {
    local pid
    proxy_directory "$1"
    if by_systemd || ! { read -r pid <"$reply/$1.pid"; } 2>/dev/null; then return 0; fi
    cat /proc/[0-9]*/stat 2>/dev/null | awk -v name="($1)" -v group="$pid" '$2 == name && $5 == group { print $1 }' |
        while read -r pid; do kill -9 "$pid" 2>/dev/null || :; done
}

# End proxy $1, with all its connections. False with refused if it stays.
proxy_stop() {
    local try pid
    proxy_runs "$1" || { proxy_orphans "$1"; return 0; }
    pid=$reply refused="$1 cannot be stopped"
    proxy_unit "$1"
    if by_systemd; then systemctl stop "$reply" 2>/dev/null; else kill "$pid" 2>/dev/null; fi || :
    for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
        proxy_runs "$1" || return 0
        # Not the first time: what has to close many connections is at work.
        case $try in 20) by_systemd || kill -9 "$pid" 2>/dev/null || : ;; esac
        sleep 0.2 2>/dev/null || sleep 1
    done
    return 1
}
