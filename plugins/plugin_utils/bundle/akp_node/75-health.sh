# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Health
# Load balancers ask a node at a Service's healthCheckNodePort whether it has endpoints of it, and at kube-proxy's
# own port (10256) whether the node can be used at all. No process waits for them: systemd or inetd listens, and
# starts this program for each connection. health.conf of the bundle is what it answers from:
#   eligible true|false              the Node is there to stay
#   period SECONDS                   the configuration's syncPeriod
#   listen FAMILY ADDRESS            where health check ports listen
#   check FAMILY PORT NAMESPACE SERVICE COUNT
# Settings: "health systemd" has apply keep a socket unit for each port; "healthz ADDRESS:PORT" one for the node.
SETTINGS="$SETTINGS health healthz"
UNITS=${AKP_UNITS:-/run/systemd/system}

guard_health() {
    guard_lines health.conf '
        BEGIN { split("'"${AKP_ACCEPT_PORTS:-1024-65535}"'", range, "-") }
        /^#/ || /^$/ || /^eligible (true|false)$/ || /^period [1-9][0-9]*$/ { next }
        /^listen (ipv4 [0-9.]+|ipv6 [0-9a-f:.]+)$/ { next }
        !/^check ipv[46] [1-9][0-9]* [a-z0-9]([a-z0-9-]*[a-z0-9])? [a-z0-9]([a-z0-9-]*[a-z0-9])? [0-9]+$/ { refuse("not a line of a health file: " $0) }
        length($4) > 63 || length($5) > 63 { refuse("a name of more than 63 characters: " $0) }
        $3 + 0 < range[1] + 0 || $3 + 0 > range[2] + 0 { refuse("a health check is answered at ports " range[1] "-" range[2] " only: " $0) }
        ($2, $3) in known { refuse("a second health check at one port: " $0) }
        { known[$2, $3] = 1 }'
}

# The health file of what is recorded; with deltas that of the last one that has one.
health_file() {
    i=$r_deltas
    while [ "${i:-0}" -gt 0 ]; do
        if [ -e "$STATE/deltas/$i/health.conf" ]; then
            printf '%s' "$STATE/deltas/$i/health.conf"
            return 0
        fi
        i=$((i - 1))
    done
    file=$STATE/bundles/$r_digest/health.conf
    if [ -f "$file" ]; then printf '%s' "$file"; else printf /dev/null; fi
}

# A change has come that is not in the kernel yet; since when is what health depends on.
sync_begins() { [ -e "$STATE/queued" ] || true 2>/dev/null >"$STATE/queued" || :; }
sync_ended() { outdated="$outdated queued"; }

# Healthy, as kube-proxy means it: no change has waited for two periods. And what was applied is in the kernel still,
# which kube-proxy would see to by itself. While a change is under way the kernel may be ahead of the record; it has to have
# something of ours even then.
proxy_healthy() {
    generation=$r_generation
    [ -n "$generation" ] || return 1
    coming=
    if [ -e "$STATE/queued" ]; then
        coming=1
        since=$(date -r "$STATE/queued" +%s 2>/dev/null) || since=0
        period=$(sed -n 's/^period //p' "$health")
        [ $(($(date +%s) - since)) -lt $((2 * ${period:-30})) ] || return 1
    fi
    mode=$r_mode flavour=$r_flavour
    for fam in $FAMILIES; do
        grep -q "^[a-z]* ipv$fam " "$health" || continue
        found=$(family_generation "$fam")
        [ "$found" != "$generation" ] || continue
        if [ -z "$coming" ]; then
            # A change may have come to its end since the record was read.
            read_record
            [ "$found" = "$r_generation" ] || return 1
            continue
        fi
        # A change of mode has removed the old one before it is recorded.
        [ -n "$found" ] || case $mode in
            nftables) found=$(mode=iptables family_generation "$fam") ;;
            *) ! has nft || found=$(mode=nftables family_generation "$fam") ;;
        esac
        [ -n "$found" ] || return 1
    done
}

# The generation in the kernel, of one family: one look at a small chain or table.
family_generation() {
    case $mode/$1 in
        nftables/4) nft_marker ip ;;
        nftables/6) nft_marker ip6 ;;
        *) ipt "$1"; "$ipt" -w 2 -t filter -S KUBE-PROXY-GENERATION 2>/dev/null | sed -n 's/^-A .*--comment "\{0,1\}\([0-9a-f]*\)"\{0,1\}$/\1/p' ;;
    esac
}

# Read one request from stdin, up to its empty line: $method, $target, $minor of HTTP/1.x, $complaint if it is none.
read_request() {
    head='' reads=0 complaint='' patience=
    if has timeout; then patience='timeout 10'; fi
    while :; do
        # One read of what is there, and never more than 64 of them: who sends more, or nothing, asks nothing.
        part=$($patience dd bs=4096 count=1 2>/dev/null | tr -d '\000\r'; printf .)
        if [ "$part" = . ] || [ "$reads" -ge 64 ]; then break; fi
        head=$head${part%.} reads=$((reads + 1))
        case $head in *'

'*) break ;; esac
    done
    # No here-document: some shells write it to a file, and there is nowhere to write.
    set -f
    # shellcheck disable=SC2086 # split into words
    set -- ${head%%
*}
    set +f
    method=${1:-} target=${2:-} version=${3:-} minor=1
    case $version in
        HTTP/1.0) minor=0 ;;
        HTTP/1.1) case $(printf '%s\n' "$head" | tr 'HOST' 'host') in *'
host:'*) ;; *) complaint=': missing required Host header' ;; esac ;;
        *) complaint=' ' ;;
    esac
}

# An answer as Go's server writes it: status, content type, body; further headers are in $headers.
http_answer() {
    case $1 in
        200) line='200 OK' ;;
        404) line='404 Not Found' ;;
        503) line='503 Service Unavailable' ;;
    esac
    printf 'HTTP/1.%s %s\r\nContent-Type: %s\r\nX-Content-Type-Options: nosniff\r\n%s' "$minor" "$line" "$2" "$headers"
    printf 'Date: %s\r\nContent-Length: %s\r\n' "$(date -u '+%a, %d %b %Y %H:%M:%S GMT')" "${#3}"
    [ "$minor" = 0 ] || printf 'Connection: close\r\n'
    printf '\r\n'
    [ "$method" = HEAD ] || printf '%s' "$3"
}

# Answer the request on stdin. $1 is a port, a port and a family as in 31000/ipv6, "healthz", or the name that systemd
# gives to the instance of a connection: NUMBER-ADDRESS:PORT-ADDRESS:PORT.
verb_health() {
    answered=1 headers=''
    case $1 in
        *-*:*-*:*)
            local=${1#*-}
            local=${local%%-*}
            port=${local##*:}
            case ${local%:*} in *:*) family=ipv6 ;; *) family=ipv4 ;; esac
            ;;
        */ipv4 | */ipv6) port=${1%/*} family=${1#*/} ;;
        *) port=$1 family=ipv4 ;;
    esac
    case $port in
        healthz) ;;
        '' | *[!0-9]*) answered='' && die 2 "health takes a port, PORT/ipv4, PORT/ipv6 or healthz, not \"$1\"" ;;
    esac
    health=$(health_file)
    read_request
    # A connection that asks nothing is not answered.
    [ -n "$head" ] || return 0
    if [ -n "$complaint" ]; then
        line="400 Bad Request${complaint% }"
        printf 'HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n%s' "$line" "$line"
    elif [ "$port" = healthz ]; then answer_healthz
    else answer_check
    fi
}

answer_check() {
    # shellcheck disable=SC2046 # split into words
    set -- $(awk -v family="$family" -v port="$port" '$1 == "check" && $2 == family && $3 == port { print $4, $5, $6 }' "$health")
    namespace=${1:-} name=${2:-} count=${3:-0}
    # Between the end of a Service and the end of its socket. Whoever asks must not take that for a yes.
    if [ -z "$name" ]; then
        http_answer 404 'text/plain; charset=utf-8' "404 page not found
"
        return 0
    fi
    healthy=false status=503
    if proxy_healthy; then healthy=true; fi
    if [ "$healthy" = true ] && [ "$count" != 0 ]; then status=200; fi
    headers=$(printf 'X-Load-Balancing-Endpoint-Weight: %s\r\n.' "$count")
    headers=${headers%.}
    http_answer "$status" application/json "{
	\"service\": {
		\"namespace\": \"$namespace\",
		\"name\": \"$name\"
	},
	\"localEndpoints\": $count,
	\"serviceProxyHealthy\": $healthy
}"
}

# What kube-proxy says at its own port: /livez, and /healthz, which minds whether the Node is to stay.
answer_healthz() {
    case ${target%%\?*} in
        /healthz) eligible=$(sed -n 's/^eligible //p' "$health") eligible=${eligible:-false} ;;
        /livez) eligible='' ;;
        *)
            http_answer 404 'text/plain; charset=utf-8' "404 page not found
"
            return 0
            ;;
    esac
    healthy=false
    if proxy_healthy; then healthy=true; fi
    now=$(utc "$(date +%s)") synced=$r_time
    if [ -n "$synced" ]; then synced=$(utc "$synced"); else synced=0001-01-01T00:00:00Z; fi
    updated=$synced status=503
    if [ "$healthy" = true ] && [ "$eligible" != false ]; then updated=$now status=200; fi
    families=$(awk -v updated="$synced" -v healthy="$healthy" '
        $1 == "listen" || $1 == "check" { if (!seen[$2]++) printf "%s\"IPv%s\":{\"lastUpdated\":\"%s\",\"healthy\":%s}", (n++ ? "," : ""), substr($2, 4), updated, healthy }' "$health")
    http_answer "$status" application/json \
        "{\"lastUpdated\":\"$updated\",\"currentTime\":\"$now\",${eligible:+\"nodeEligible\":$eligible,}\"healthy\":$healthy,\"status\":{$families}}"
}

# Seconds since the epoch as RFC 3339.
utc() { date -u -d "@$1" +%Y-%m-%dT%H:%M:%SZ; }

# Keep the socket units in step with what was applied. What goes wrong here is a warning: the rules are in.
health_sync() {
    wanted=none
    ! has_settings || wanted=$(setting health none)
    case $wanted in
        systemd) ;;
        none) health_leave; return 0 ;;
        *) warn "setting health is systemd or none, not \"$wanted\""; return 0 ;;
    esac
    if ! has systemctl || [ ! -d /run/systemd/system ]; then
        warn "setting health is systemd, but systemd does not run here"
        return 0
    fi
    rm -rf "$work/units"
    mkdir "$work/units"
    { health_units "$work/units" && health_start "$work/units"; } || warn "the socket units of health checks could not be written to $UNITS"
}

# The unit files that should be there, in $1.
health_units() {
    awk -v dir="$1" '
        $1 == "listen" { at[$2] = at[$2] "ListenStream=" ($2 == "ipv6" ? "[" $3 "]" : $3) ":PORT\n" }
        $1 == "check" { lines = at[$2]; gsub("PORT", $3, lines); unit[$3] = unit[$3] lines; service[$3] = $4 "/" $5 }
        END {
            for (port in unit) if (unit[port] != "") {
                file = dir "/akp-health@" port ".socket"
                printf "[Unit]\nDescription=Health checks of %s, port %s\n\n[Socket]\n%s", service[port], port, unit[port] > file
                close(file)
            }
        }' "$(health_file)"
    for unit in "$1"/akp-health@*.socket; do [ ! -e "$unit" ] || socket_unit >>"$unit"; done
    healthz=$(setting healthz)
    if [ -n "$healthz" ]; then
        { printf '[Unit]\nDescription=Health of the service proxy\n\n[Socket]\nListenStream=%s\n' "$healthz"; socket_unit; } >"$1/akp-healthz.socket"
        service_unit healthz >"$1/akp-healthz@.service"
    fi
    service_unit %i >"$1/akp-health@.service"
    # The program that runs here, and none that a bundle brings: what systemd starts, nobody has looked at. Nothing need be
    # installed for that.
    if ! runs_from_file; then [ -f "$STATE/akp-node" ]; return; fi
    cmp -s "$0" "$STATE/akp-node" || { cp "$0" "$STATE/akp-node.new" && mv "$STATE/akp-node.new" "$STATE/akp-node"; }
}

# What all sockets have. A limit on triggers would end a socket that is asked too often; one on connections does not.
socket_unit() {
    cat <<END
BindIPv6Only=ipv6-only
FreeBind=yes
Accept=yes
MaxConnections=64
TriggerLimitIntervalSec=0
END
}

service_unit() {
    cat <<END
[Unit]
Description=Answer to a health check
CollectMode=inactive-or-failed

[Service]
ExecStart=-/bin/sh $STATE/akp-node health $1
Environment=AKP_STATE=$STATE
StandardInput=socket
StandardOutput=socket
StandardError=journal
RuntimeMaxSec=15
TasksMax=32
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=-/run/xtables.lock
ProtectHome=yes
CapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
END
}

# Make the units in $1 those that systemd has, touching only what differs.
health_start() {
    fresh='' stale=''
    for unit in "$UNITS"/akp-health@*.socket "$UNITS"/akp-healthz.socket "$UNITS"/akp-health*@.service; do
        [ ! -e "$unit" ] || [ -e "$1/${unit##*/}" ] || stale="$stale ${unit##*/}"
    done
    for unit in "$1"/*; do
        cmp -s "$unit" "$UNITS/${unit##*/}" || fresh="$fresh ${unit##*/}"
    done
    [ -n "$fresh$stale" ] || return 0
    # shellcheck disable=SC2046 # names
    set -- "$1" $(only_sockets "$stale $fresh")
    dir=$1
    shift
    [ $# -eq 0 ] || systemctl stop "$@" 2>/dev/null || :
    for unit in $stale; do rm -f "$UNITS/$unit"; done
    for unit in $fresh; do cp "$dir/$unit" "$UNITS/$unit" && chmod 644 "$UNITS/$unit" || return 1; done
    systemctl daemon-reload
    # shellcheck disable=SC2046 # names
    set -- $(only_sockets "$fresh")
    # At boot the rest of the system may wait for us: do not wait for it.
    [ $# -eq 0 ] || systemctl --no-block start "$@"
}

only_sockets() { for unit in $1; do case $unit in *.socket) printf '%s ' "$unit" ;; esac; done; }

# No unit of ours is left.
health_leave() {
    found=
    for unit in "$UNITS"/akp-health@*.socket "$UNITS"/akp-healthz.socket "$UNITS"/akp-health*@.service; do [ ! -e "$unit" ] || found=1; done
    if [ -n "$found" ]; then
        mkdir -p "$work/none"
        health_start "$work/none" || warn "the socket units of health checks could not be removed from $UNITS"
    fi
    [ ! -e "$STATE/akp-node" ] || rm -f "$STATE/akp-node"
}
