# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Carriers
# What a control host that serves many nodes wants to know, cheaply and exactly.

GLIMPSE_LIMIT=2000000    # bytes of rules up to which reading all of them is cheaper than asking for parts
services=
max_removed=
dry_run=
known=
HOST_TOOLS='iptables ip6tables nft ipset ipvsadm conntrack nfacct unshare'

# awk: what a line of services.jsonl stands for, and the words of a refusal. A port counts once, whichever of its families it
# has or loses: losing all of one is losing that of every Service.
AWK_SHRINK='
function key(line) { return match(line, /"family":"IPv[46]"/) ? substr(line, 1, RSTART + RLENGTH) : line }
function port(line,   i) { i = index(line, ",\"family\":"); return i ? substr(line, 1, i) : line }
# The API server keeps its own endpoints itself, whatever becomes of all others.
function busy(line) { return index(line, "\"endpoints\":[\"") && index(line, "{\"service\":\"default/kubernetes\",") != 1 }
function count(line) { if (!(port(line) in counted)) { counted[port(line)] = 1; n++ } }
function lose(line,   word) {
    if (port(line) in lost) return
    lost[port(line)] = 1
    if (++removed > 10) return
    split(line, word, "\"")
    names = names (removed > 1 ? ", " : "") word[4] ":" word[8] " " word[12] " " word[16]
}
function refuse(about, what, limit) {
    if (!n || removed * 100 <= limit * n) return
    printf "%d of %s%d %s, more than %d %%: %s%s\n", removed, about, n, what, limit, names, (removed > 10 ? ", ..." : "")
}
'

# Compare the service ports of two bundle directories (a missing one has none) into $work/services, and
# refuse (2) if more than $max_removed percent of the old ones would be gone; or, if none has endpoints any more, of those
# that had some.
compare_services() {
    [ -n "$services$max_removed" ] || return 0
    for d in "$1" "$2"; do [ -f "$d/services.jsonl" ] || : >"$work/services.jsonl"; done
    old=$1/services.jsonl new=$2/services.jsonl
    [ -f "$old" ] || old=$work/services.jsonl
    [ -f "$new" ] || new=$work/services.jsonl
    share=$(awk -v out="$work/services" -v limit="${max_removed:-100}" "$AWK_SHRINK"'
        pass == 1 { before[$0] = 1; order[++lines] = $0; next }
        {
            alive[key($0)] = 1
            if (busy($0)) served = 1
            if ($0 in before) delete before[$0]; else print "+" $0 > out
        }
        END {
            printf "" > out
            for (i = 1; i <= lines; i++) {
                line = order[i]
                if (line in before) print "-" line > out
                if (!served && busy(line) && key(line) in alive) emptied = 1
            }
            for (i = 1; i <= lines; i++) {
                line = order[i]
                if (emptied && !busy(line)) continue
                count(line)
                if (emptied || !(key(line) in alive)) lose(line)
            }
            refuse("", emptied ? "service ports that have endpoints would be removed or have none left" : "service ports would be removed", limit)
        }' pass=1 "$old" pass=2 "$new") || die 3 "the comparison of service ports failed (is ${TMPDIR:-/tmp} full?)"
    [ -z "$share" ] || die_shrunken
}
die_shrunken() { die 2 "refused: $share. If that is meant, allow it with --max-removed 100 (kube_proxy_max_removed_percent)"; }

print_services() { [ -z "$services" ] || cat "$work/services"; }

# The text whose checksum tells ask that nothing changed: the kernel's rules and the sysctls of the bundle.
glimpse() {
    "${mode}_glimpse"
    # One cat for all: the shell's own read gets no more than a digit out of such files.
    # shellcheck disable=SC2046 # split at the blanks
    cat /dev/null $(sysctl_paths) 2>&1 || :
}

# The files of the sysctls of the bundle.
sysctl_paths() {
    [ -s "$bundle/sysctls.conf" ] || return 0
    while read -r name _; do
        case $name in '' | '#'*) continue ;; esac
        IFS=.
        # shellcheck disable=SC2086 # split at the dots
        set -- $name
        IFS=/
        printf ' %s' "/proc/sys/$*"
        IFS=' '
    done <"$bundle/sysctls.conf"
}

# Does the mode have a look that is cheap enough for ask? Without one, whatever was noted in another mode goes.
can_glimpse() {
    if type "${mode}_glimpse" >/dev/null 2>&1; then return 0; fi
    if [ -e "$STATE/seen" ] || [ -e "$STATE/ask" ]; then rm -f "$STATE/seen" "$STATE/ask"; fi
    return 1
}

# Note the checksum of a kernel that was found to be what was applied. Called by verbs that hold the lock.
note_seen() {
    rm -f "$STATE/seen" "$STATE/ask"
    [ "$(cat "$bundle"/*.rules "$bundle"/*.nft 2>/dev/null | wc -c)" -le "$GLIMPSE_LIMIT" ] || return 0
    glimpse >"$work/glimpse.1"
    # Between the change and this look somebody may have meddled: only a look that compares equal counts.
    "${mode}_reread" || return 0
    "${mode}_compare"
    if "${mode}_pending"; then return 0; fi
    glimpse >"$work/glimpse.2"
    cmp -s "$work/glimpse.1" "$work/glimpse.2" || return 0
    printf '%s %s\n' "$digest" "$(sha256sum <"$work/glimpse.2")" >"$STATE/seen.new"
    mv "$STATE/seen.new" "$STATE/seen"
    if [ "$mode/$flavour" = iptables/nft ]; then write_question; fi
}

# Leave a few lines of shell that answer ask if nothing changed, for carriers that would otherwise start all of this
# program for it. They are sourced with the key and the program that the carrier knows, and say nothing otherwise.
write_question() {
    ipt 4 save
    look=$ipt
    ipt 6 save
    look="{ $look; $ipt; } 2>/dev/null | sed -n -e '/^:KUBE-KUBELET-CANARY /d' -e '/^:KUBE-IPTABLES-HINT /d' -e /KUBE-/p -e '/^[0-9]*\$/p' -"
    look="$look $(sysctl_paths) /proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal $ROUTE_LOCALNET 2>/dev/null"
    sh -c "$look" >"$work/look" || :
    grep -q "$generation" "$work/look" || return 0
    program=$(sed -n 's/^ *"akp-node": "\([0-9a-f]*\)",\{0,1\}$/\1/p' "$bundle/manifest.json")
    cat >"$STATE/ask.new" <<END
# Written by akp-node: an answer to ask for as long as nothing changes. Sourced with the key and the program's digest.
PATH=\${PATH:-}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
read -r key </proc/sys/kernel/random/boot_id
for name in $HOST_TOOLS; do if command -v "\$name" >/dev/null 2>&1; then key=\$key.\$name; fi; done
if [ "\$1 \$2" = "\$key $program" ] && [ ! -e "\$AKP_STATE/unconfirmed" ] && [ ! -e "\$AKP_STATE/undone" ] && [ "\$($look | sha256sum)" = "$(sha256sum <"$work/look")" ]; then
    ip -o addr show
    printf '%s\n' '{"verb": "ask", "ok": true, "facts": null, "status": {"state": "applied", "generation": "$generation", "mode": "$mode", "node": "$node", "flavour": "$flavour", "kept": [$(kept_generations)], "quick": true}, "akpNode": "$VERSION"}'
    exit 0
fi
END
    mv "$STATE/ask.new" "$STATE/ask"
}

# Is the kernel what it was when it was last found right? Sets generation, digest, mode, node, flavour.
seen_still() {
    [ -r "$STATE/seen" ] && [ -r "$STATE/applied" ] && [ ! -e "$STATE/unconfirmed" ] && [ ! -e "$STATE/undone" ] || return 1
    generation=$r_generation digest=$r_digest mode=$r_mode node=$r_node flavour=$r_flavour
    bundle=$STATE/bundles/$digest
    read -r seen checksum <"$STATE/seen"
    [ "$seen" = "$digest" ] && [ "$(glimpse | sha256sum)" = "$checksum" ]
}

# Packets to 127.0.0.0/8 are let in from outside, and nothing that was applied asks for it: an earlier kube-proxy or an
# earlier bundle did, and nobody switched it off.
ROUTE_LOCALNET=/proc/sys/net/ipv4/conf/all/route_localnet
route_localnet_left() {
    [ -r "$ROUTE_LOCALNET" ] && grep -q 1 "$ROUTE_LOCALNET" || return 1
    recorded_bundle
    ! grep -q '^net\.ipv4\.conf\.all\.route_localnet *= *1' "${recorded:-/nonexistent}/sysctls.conf" 2>/dev/null
}

# What capabilities can depend on, in $this_host: this boot, and the tools there are.
host_key() {
    read -r this_host </proc/sys/kernel/random/boot_id
    for name in $HOST_TOOLS; do if has "$name"; then this_host=$this_host.$name; fi; done
}

# What a carrier asks at every run: is the kernel still what was recorded, and is this still the host it knows?
# The usual yes costs a handful of processes. If it is not a clear yes, the answer is that of status.
verb_ask() {
    facts=null
    host_key
    if [ "$known" != "$this_host" ]; then
        make_work
        called=$(verb_facts)
        facts=$called
    fi
    if [ -z "$verify" ] && seen_still; then
        answer="{\"state\": \"applied\", \"generation\": \"$generation\", \"mode\": \"$mode\", \"node\": \"$node\", \"flavour\": \"$flavour\", \"kept\": [$(kept_generations)], \"quick\": true}"
    else
        [ -n "$work" ] || make_work
        # A kernel that was right once and is not what it was: say in what.
        if [ -r "$STATE/seen" ] && [ ! -e "$STATE/unconfirmed" ]; then verify=1; fi
        called=$(verb_status)
        answer=$called
    fi
    be_liberal=0
    if [ -r /proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal ]; then
        # One digit, and for the shell then the file ends: no reason to fail.
        read -r be_liberal </proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal || :
    fi
    printf '{"verb": "ask", "ok": true, "key": "%s", "addresses": [%s], "tcpBeLiberal": %d, "routeLocalnetLeft": %s, ' \
        "$this_host" "$(interface_addresses)" "$be_liberal" "$(truth route_localnet_left)"
    printf '"facts": %s, "status": %s, "akpNode": "%s"}\n' "$facts" "$answer" "$VERSION"
}

