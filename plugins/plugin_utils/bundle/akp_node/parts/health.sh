# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-health - tell load balancers whether this node has endpoints of a Service, and whether it can be used at all.
#
#   akp-health PORT[/ipv4|/ipv6]   answer one HTTP request on stdin as kube-proxy does at a healthCheckNodePort
#   akp-health healthz             the same at kube-proxy's own port: /healthz and /livez
#   akp-health sync                make the socket units of systemd fit what is applied; akp-node runs it after a change
#
# No process waits for requests: systemd or inetd listens, and starts this program for each connection. It answers from what akp-node
# left in the state directory:
#   health.conf     period SECONDS; listen FAMILY ADDRESS; check FAMILY PORT NAMESPACE SERVICE
#   health.counts   eligible true|false; count FAMILY PORT ENDPOINTS
#   record          the generation that is applied; queued: since when a change waits for the kernel
# Settings in node.conf: "health systemd" has sync keep a socket unit for each port; "healthz ADDRESS:PORT" one for the node.
set -euf
umask 077
LC_ALL=C
PATH=${AKP_PATH:+$AKP_PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}
export LC_ALL PATH
STATE=${AKP_STATE:-/var/lib/akp} ETC=${AKP_ETC:-/etc/akp} RUN=${AKP_RUN:-/run/akp} UNITS=${AKP_UNITS:-/run/systemd/system}
PATIENCE=5    # seconds in which a request has to be here
NL='
'
r_generation='' r_mode='' r_flavour='' r_time=''               # the record
port='' family='' method='' target='' minor=1 complaint=''     # which question this is, and the request
namespace='' name='' count=0 period=30 eligible='' families='' # what health.conf and health.counts say
epoch=0 now='' http_date='' headers='' reply=''

has() { command -v "$1" >/dev/null 2>&1; }

# End with a message and exit code $2, or 1.
fail() { printf 'akp-health: %s\n' "$1" >&2 && exit "${2:-1}"; }

# Read the record of akp-node.
read_record() {
    local key value
    r_generation='' r_mode='' r_flavour='' r_time=''
    [ -r "$STATE/record" ] || return 0
    while IFS='=' read -r key value; do
        case $key in generation) r_generation=$value ;; mode) r_mode=$value ;; flavour) r_flavour=$value ;; time) r_time=$value ;; esac
    done <"$STATE/record"
}

# Read what health.conf and health.counts say of this port and of the node.
read_health() {
    local word a b c d
    [ ! -r "$STATE/health.conf" ] || while read -r word a b c d; do
        case $word in
            period) period=$a ;;
            listen | check) case $families in *"$a"*) ;; *) families="$families $a" ;; esac ;;
        esac
        if [ "$word $a $b" = "check $family $port" ]; then namespace=$c name=$d; fi
    done <"$STATE/health.conf"
    [ ! -r "$STATE/health.counts" ] || while read -r word a b c; do
        case $word in
            eligible) eligible=$a ;;
            count) [ "$a $b" != "$family $port" ] || count=$c ;;
        esac
    done <"$STATE/health.counts"
    case $count$period in *[!0-9]*) count=0 period=30 ;; esac
}

# ---------------------------------------------------------------- The kernel
# True if the marker of generation $1 is in the kernel, in each family that is served. One process of nft, or one of iptables each.
marker_there() {
    local fam rest chain=''
    if [ "$r_mode" = nftables ]; then
        # Only pretended: a marker that is there could be deleted.
        for fam in $families; do case $fam in ipv4) fam=ip ;; *) fam=ip6 ;; esac; chain="${chain}delete chain $fam kube-proxy gen-$1;"; done
        nft -c "$chain" >/dev/null 2>&1
        return
    fi
    rest=${1%"${1#?????????????}"}
    while [ -n "$rest" ]; do
        case $rest in a*) reply=A ;; b*) reply=B ;; c*) reply=C ;; d*) reply=D ;; e*) reply=E ;; f*) reply=F ;; *) reply=${rest%"${rest#?}"} ;; esac
        chain=$chain$reply rest=${rest#?}
    done
    for fam in $families; do
        iptables_of "$fam" && "$reply" -w 2 -t filter -C "KUBE-PROXY-GEN-$chain" -m comment --comment "$1" >/dev/null 2>&1 || return 1
    done
}

# reply is the command for family $1 in the recorded flavour. False where a legacy table is not there: asking would make it.
iptables_of() {
    local tables
    case $1 in ipv4) reply=iptables tables=/proc/net/ip_tables_names ;; *) reply=ip6tables tables=/proc/net/ip6_tables_names ;; esac
    [ "$r_flavour" != legacy ] || grep -q -x filter "$tables" 2>/dev/null || return 1
    ! has "$reply-$r_flavour" || reply=$reply-$r_flavour
}

# True if the kernel has a marker of any generation, of any mode, in each family that is served. Only while a change is under way.
any_marker() {
    local fam f
    for fam in $families; do
        case $fam in ipv4) f=ip ;; *) f=ip6 ;; esac
        if has nft && nft list chains "$f" 2>/dev/null | grep -q 'chain gen-'; then continue; fi
        iptables_of "$fam" && "$reply" -w 2 -t filter -S 2>/dev/null | grep -q '^-N KUBE-PROXY-GEN-' || return 1
    done
}

# True if the node is healthy, as kube-proxy means it: no change has waited for two periods. And what was applied is in the kernel
# still, which kube-proxy would see to by itself. While a change is under way the kernel may be ahead of the record; it has to have
# something of ours even then.
healthy() {
    local since asked try
    asked=''
    for try in 1 2; do
        [ -n "$r_generation" ] || return 1
        if [ -e "$STATE/queued" ]; then
            since=$(date -r "$STATE/queued" +%s 2>/dev/null) || since=$epoch
            [ $((epoch - since)) -lt $((2 * period)) ] || return 1
            any_marker
            return
        fi
        [ "$r_generation" != "$asked" ] || return 1
        ! marker_there "$r_generation" || return 0
        # A change may have begun or ended since the record was read.
        asked=$r_generation
        read_record
    done
    return 1
}

# ---------------------------------------------------------------- HTTP
# Read one request from stdin, up to its empty line. False if none came in time: a connection that asks nothing is not answered.
read_request() {
    local head part reads start left version patience
    head='' reads=0 patience=''
    read -r start _ </proc/uptime
    start=${start%.*}
    while :; do
        read -r left _ </proc/uptime
        left=$((start + PATIENCE - ${left%.*}))
        if [ "$left" -le 0 ] || [ "$reads" -ge 16 ]; then return 1; fi
        # One read of what is there. The dot keeps the line ends before it.
        if has timeout; then patience="timeout $left"; fi
        part=$($patience dd bs=4096 count=1 2>/dev/null || :; printf .)
        [ "$part" != . ] || return 1
        head=$head${part%.} reads=$((reads + 1))
        # The empty line may have a carriage return in it.
        case $head in *"$NL$NL"* | *"$NL"?"$NL"*) break ;; esac
    done
    # shellcheck disable=SC2086 # words
    set -- ${head%%"$NL"*}
    method=${1:-} target=${2:-} version=${3:-}
    case $version in
        HTTP/1.0 | HTTP/1.0[!0-9.]) minor=0 ;;
        HTTP/1.1 | HTTP/1.1[!0-9.]) case $head in *"$NL"[Hh][Oo][Ss][Tt]:*) ;; *) complaint=': missing required Host header' ;; esac ;;
        *) complaint=' ' ;;
    esac
}

# Print an answer as Go's server writes it: status line, content type, body; further headers are in headers.
http_answer() {
    printf 'HTTP/1.%s %s\r\nContent-Type: %s\r\nX-Content-Type-Options: nosniff\r\n%b' "$minor" "$1" "$2" "$headers"
    printf 'Date: %s\r\nContent-Length: %s\r\n' "$http_date" "${#3}"
    [ "$minor" = 0 ] || printf 'Connection: close\r\n'
    printf '\r\n'
    [ "$method" = HEAD ] || printf '%s' "$3"
}

not_found() { http_answer '404 Not Found' 'text/plain; charset=utf-8' "404 page not found$NL"; }

# Answer for a Service.
answer_check() {
    local well status
    # Between the end of a Service and the end of its socket. The client must not take that for a yes.
    if [ -z "$name" ]; then not_found && return 0; fi
    well=false status='503 Service Unavailable'
    if healthy; then well=true; fi
    if [ "$well" = true ] && [ "$count" != 0 ]; then status='200 OK'; fi
    headers="X-Load-Balancing-Endpoint-Weight: $count\\r\\n"
    http_answer "$status" application/json "{
	\"service\": {
		\"namespace\": \"$namespace\",
		\"name\": \"$name\"
	},
	\"localEndpoints\": $count,
	\"serviceProxyHealthy\": $well
}"
}

# Answer for the node: /livez, and /healthz, which minds whether the Node is to stay.
answer_healthz() {
    local well status synced updated list fam
    case ${target%%\?*} in
        /healthz) eligible=${eligible:-false} ;;
        /livez) eligible='' ;;
        *) not_found; return 0 ;;
    esac
    well=false status='503 Service Unavailable' synced=0001-01-01T00:00:00Z list=''
    if healthy; then well=true; fi
    [ -z "$r_time" ] || synced=$(date -u -d "@$r_time" +%Y-%m-%dT%H:%M:%SZ)
    updated=$synced
    if [ "$well" = true ] && [ "$eligible" != false ]; then updated=$now status='200 OK'; fi
    for fam in $families; do list="$list${list:+,}\"IPv${fam#ipv}\":{\"lastUpdated\":\"$synced\",\"healthy\":$well}"; done
    http_answer "$status" application/json \
        "{\"lastUpdated\":\"$updated\",\"currentTime\":\"$now\",${eligible:+\"nodeEligible\":$eligible,}\"healthy\":$well,\"status\":{$list}}"
}

# Answer the request on stdin. $1 is a port, a port and a family as in 31000/ipv6, "healthz", or the name that systemd
# gives to the instance of a connection: NUMBER-ADDRESS:PORT-ADDRESS:PORT.
serve() {
    local place
    family=ipv4 port=$1
    case $1 in
        *-*:*-*:*)
            place=${1#*-} place=${place%%-*} port=${place##*:}
            case ${place%:*} in *:*) family=ipv6 ;; esac
            ;;
        */ipv4 | */ipv6) port=${1%/*} family=${1#*/} ;;
    esac
    case $port in healthz) ;; '' | *[!0-9]*) fail "takes a port, PORT/ipv4, PORT/ipv6, healthz or sync, not \"$1\"" 2 ;; esac
    read_request || return 0
    if [ -n "$complaint" ]; then
        complaint="400 Bad Request${complaint% }"
        printf 'HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n%s' "$complaint" "$complaint"
        return 0
    fi
    # No here-document: some shells write it to a file.
    # shellcheck disable=SC2046 # words
    set -- $(date -u '+%s %Y-%m-%dT%H:%M:%SZ %a, %d %b %Y %H:%M:%S GMT')
    epoch=$1 now=$2
    shift 2
    http_date=$*
    read_record
    read_health
    if [ "$port" = healthz ]; then answer_healthz; else answer_check; fi
}

# ---------------------------------------------------------------- systemd
# What all sockets have. A limit on triggers would end a socket that is asked too often; one on connections does not.
SOCKET='BindIPv6Only=ipv6-only
FreeBind=yes
Accept=yes
MaxConnections=64
TriggerLimitIntervalSec=0'

# Print the unit that answers a connection; $1 is what it is asked about. It can read, ask the kernel for rules, and nothing else.
service_unit() {
    cat <<END
[Unit]
Description=Answer to a health check
CollectMode=inactive-or-failed

[Service]
ExecStart=-/bin/sh $program $1
Environment=AKP_STATE=$STATE
StandardInput=socket
StandardError=journal
RuntimeMaxSec=10
TasksMax=16
MemoryMax=64M
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=-/run/xtables.lock
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
LockPersonality=yes
MemoryDenyWriteExecute=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
END
}

# Write the unit files that should be there into directory $1; the settings are $2 and $3.
write_units() {
    if [ "$2" != systemd ] || [ ! -r "$STATE/health.conf" ]; then return 0; fi
    awk -v dir="$1" -v socket="$SOCKET" '
        $1 == "listen" { at[$2] = at[$2] "ListenStream=" ($2 == "ipv6" ? "[" $3 "]" : $3) ":PORT\n" }
        $1 == "check" && !seen[$2, $3]++ { lines = at[$2]; gsub("PORT", $3, lines); unit[$3] = unit[$3] lines; service[$3] = $4 "/" $5 }
        END {
            for (port in unit) if (unit[port] != "") {
                file = dir "/akp-health@" port ".socket"
                printf "[Unit]\nDescription=Health checks of %s, port %s\n\n[Socket]\n%s%s\n", service[port], port, unit[port], socket > file
                close(file)
            }
        }' "$STATE/health.conf" || return 1
    service_unit %i >"$1/akp-health@.service"
    [ -n "$3" ] || return 0
    printf '[Unit]\nDescription=Health of the service proxy\n\n[Socket]\nListenStream=%s\n%s\n' "$3" "$SOCKET" >"$1/akp-healthz.socket"
    service_unit healthz >"$1/akp-healthz@.service"
}

# Make the units in directory $1 those that systemd has, touching only what differs.
start_units() {
    local unit dir fresh stale sockets
    dir=$1 fresh='' stale='' sockets=''
    set +f
    for unit in "$UNITS"/akp-health@*.socket "$UNITS"/akp-healthz.socket "$UNITS"/akp-health*@.service; do
        [ ! -e "$unit" ] || [ -e "$dir/${unit##*/}" ] || stale="$stale ${unit##*/}"
    done
    for unit in "$dir"/*; do
        [ ! -e "$unit" ] || cmp -s "$unit" "$UNITS/${unit##*/}" || fresh="$fresh ${unit##*/}"
    done
    set -f
    [ -n "$fresh$stale" ] || return 0
    for unit in $stale $fresh; do case $unit in *.socket) sockets="$sockets $unit" ;; esac; done
    # shellcheck disable=SC2086 # names
    [ -z "$sockets" ] || systemctl stop $sockets 2>/dev/null || :
    for unit in $stale; do rm -f "$UNITS/$unit"; done
    for unit in $fresh; do cp "$dir/$unit" "$UNITS/$unit" && chmod 644 "$UNITS/$unit" || return 1; done
    systemctl daemon-reload || return 1
    sockets=''
    for unit in $fresh; do case $unit in *.socket) sockets="$sockets $unit" ;; esac; done
    # At boot the rest of the system may wait for us: do not wait for it.
    # shellcheck disable=SC2086 # names
    [ -z "$sockets" ] || systemctl --no-block start $sockets
}

# Keep the socket units in step with what is applied.
sync_units() {
    local key value wanted healthz dir
    wanted=none healthz='' dir=$RUN/health.$$
    [ ! -r "$ETC/node.conf" ] || while read -r key value || [ -n "$key" ]; do
        case $key in health) wanted=$value ;; healthz) healthz=$value ;; esac
    done <"$ETC/node.conf"
    case $wanted in systemd | none) ;; *) fail "setting health is systemd or none, not \"$wanted\"" ;; esac
    if ! has systemctl || [ ! -d /run/systemd/system ]; then
        [ "$wanted" = none ] || fail "setting health is systemd, but systemd does not run here"
        return 0
    fi
    [ -d "$RUN" ] || mkdir -p "$RUN" || fail "$RUN cannot be made"
    if [ -L "$RUN" ] || [ ! -O "$RUN" ]; then fail "the directory $RUN does not belong to root"; fi
    { rm -rf "$dir" && mkdir "$dir"; } || fail "$RUN cannot be written"
    trap 'rm -rf "$RUN/health.$$"' EXIT
    { write_units "$dir" "$wanted" "$healthz" && start_units "$dir"; } || fail "the socket units of health checks could not be written to $UNITS"
}

[ $# -eq 1 ] || fail "usage: akp-health PORT[/ipv4|/ipv6] | healthz | sync" 2
case $0 in /*) program=$0 ;; *) program=$PWD/$0 ;; esac
if [ "$1" = sync ]; then sync_units; else serve "$1"; fi
