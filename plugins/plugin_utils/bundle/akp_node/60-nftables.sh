# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- nftables: guard
# Ours are the tables kube-proxy of the families ip and ip6, and beside each an empty table
# kube-proxy-generation, whose comment is the marker: it is read without listing any rule.

# Every command that a bundle may hold. F is the family, ADDR, NET and TO are an address, a network, and an
# address with a port, P is a protocol, # a number; the name of a Service's object ends in NAME. A list stands
# for itself and longer ones. Where an object is made here it may be flushed too.
NFT_COMMANDS='
add table F kube-proxy { comment "rules for kube-proxy" ; }
add table F kube-proxy-generation
delete table F kube-proxy-generation
add table F kube-proxy-generation { comment GENERATION ; }
add set F kube-proxy cluster-ips { type TYPE ; comment "Active ClusterIPs" ; }
add set F kube-proxy nodeport-ips { type TYPE ; comment "IPs that accept NodePort traffic" ; }
add set F kube-proxy hairpin-connections { type TYPE . TYPE . inet_proto . inet_service ; comment "service hairpin connections" ; }
add map F kube-proxy service-ips { type TYPE . inet_proto . inet_service : verdict ; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic" ; }
add map F kube-proxy service-nodeports { type inet_proto . inet_service : verdict ; comment "NodePort traffic" ; }
add map F kube-proxy firewall-ips { type TYPE . inet_proto . inet_service : verdict ; comment "destinations that are subject to LoadBalancerSourceRanges" ; }
add map F kube-proxy no-endpoint-services { type TYPE . inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to services with no endpoints" ; }
add map F kube-proxy no-endpoint-nodeports { type inet_proto . inet_service : verdict ; comment "vmap to drop or reject packets to service nodeports with no endpoints" ; }
add map F kube-proxy localhost-nodeport-reject-ports { type inet_proto . inet_service : verdict ; comment "localhost NodePorts rejected by kube-proxy" ; }
add counter F kube-proxy localhost-nodeport-rejected-P
add chain F kube-proxy filter-prerouting-pre-dnat { type filter hook prerouting priority -110 ; }
add chain F kube-proxy filter-output-pre-dnat { type filter hook output priority -110 ; }
add chain F kube-proxy filter-input { type filter hook input priority 0 ; }
add chain F kube-proxy filter-forward { type filter hook forward priority 0 ; }
add chain F kube-proxy filter-output { type filter hook output priority 0 ; }
add chain F kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
add chain F kube-proxy nat-output { type nat hook output priority -100 ; }
add chain F kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
add chain F kube-proxy nodeport-endpoints-check
add chain F kube-proxy service-endpoints-check
add chain F kube-proxy firewall-check
add chain F kube-proxy cluster-ips-check
add chain F kube-proxy services
add chain F kube-proxy masquerading
add chain F kube-proxy reject-chain { comment "helper for @no-endpoint-services / @no-endpoint-nodeports" ; }
add chain F kube-proxy localhost-nodeport-reject-P
add chain F kube-proxy service-NAME
add chain F kube-proxy local-NAME
add chain F kube-proxy external-NAME
add chain F kube-proxy firewall-NAME
add chain F kube-proxy endpoint-NAME
add set F kube-proxy affinity-NAME { type TYPE ; flags dynamic,timeout ; timeout SECONDS ; }
add element F kube-proxy cluster-ips { ADDR }
add element F kube-proxy nodeport-ips { ADDR }
add element F kube-proxy hairpin-connections { ADDR . ADDR . P . # }
add element F kube-proxy service-ips { ADDR . P . # : goto service-NAME }
add element F kube-proxy service-ips { ADDR . P . # : goto local-NAME }
add element F kube-proxy service-ips { ADDR . P . # : goto external-NAME }
add element F kube-proxy service-nodeports { P . # : goto external-NAME }
add element F kube-proxy firewall-ips { ADDR . P . # : goto firewall-NAME }
add element F kube-proxy no-endpoint-services { ADDR . P . # comment SERVICE : drop }
add element F kube-proxy no-endpoint-services { ADDR . P . # comment SERVICE : goto reject-chain }
add element F kube-proxy no-endpoint-nodeports { P . # comment SERVICE : drop }
add element F kube-proxy no-endpoint-nodeports { P . # comment SERVICE : goto reject-chain }
add element F kube-proxy localhost-nodeport-reject-ports { P . # : goto localhost-nodeport-reject-P }
add rule F kube-proxy filter-prerouting-pre-dnat ct state new jump firewall-check
add rule F kube-proxy filter-output-pre-dnat ct state new jump firewall-check
add rule F kube-proxy filter-input ct state new jump nodeport-endpoints-check
add rule F kube-proxy filter-input ct state new jump service-endpoints-check
add rule F kube-proxy filter-forward ct state new jump service-endpoints-check
add rule F kube-proxy filter-forward ct state new jump cluster-ips-check
add rule F kube-proxy filter-output ct state new jump service-endpoints-check
add rule F kube-proxy filter-output ct state new jump cluster-ips-check
add rule F kube-proxy nat-prerouting jump services
add rule F kube-proxy nat-output jump services
add rule F kube-proxy nat-postrouting jump masquerading
add rule F kube-proxy nodeport-endpoints-check F daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
add rule F kube-proxy nodeport-endpoints-check F daddr != LOOPBACK meta l4proto . th dport vmap @no-endpoint-nodeports
add rule F kube-proxy nodeport-endpoints-check F daddr LOOPBACK meta l4proto . th dport vmap @localhost-nodeport-reject-ports
add rule F kube-proxy service-endpoints-check F daddr . meta l4proto . th dport vmap @no-endpoint-services
add rule F kube-proxy firewall-check F daddr . meta l4proto . th dport vmap @firewall-ips
add rule F kube-proxy cluster-ips-check F daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
add rule F kube-proxy cluster-ips-check F daddr { NET } drop comment "Drop traffic to unallocated ClusterIPs"
add rule F kube-proxy services F daddr @cluster-ips mark set mark or MARK comment "masquerade all clusterIP traffic"
add rule F kube-proxy services F daddr @cluster-ips F saddr != NET mark set mark or MARK comment "masquerade clusterIP traffic from outside cluster"
add rule F kube-proxy services F daddr @cluster-ips iifname != DEVICE mark set mark or MARK comment "masquerade clusterIP traffic from outside cluster"
add rule F kube-proxy services F daddr . meta l4proto . th dport vmap @service-ips
add rule F kube-proxy services F daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
add rule F kube-proxy services fib daddr type local F daddr != LOOPBACK meta l4proto . th dport vmap @service-nodeports
add rule F kube-proxy masquerading mark and MARK != 0 mark set mark xor MARK masquerade fully-random
add rule F kube-proxy masquerading ct status dnat F saddr . F daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
add rule F kube-proxy reject-chain reject
add rule F kube-proxy localhost-nodeport-reject-P counter name REJECTED reject
add rule F kube-proxy service-NAME meta l4proto P dnat to TO
add rule F kube-proxy service-NAME meta l4proto P dnat F addr . port to numgen random mod # map { 0 : ADDR . # }
add rule F kube-proxy service-NAME F saddr @affinity-NAME goto endpoint-NAME
add rule F kube-proxy service-NAME numgen random mod # vmap { 0 : goto endpoint-NAME }
add rule F kube-proxy local-NAME meta l4proto P dnat to TO
add rule F kube-proxy local-NAME meta l4proto P dnat F addr . port to numgen random mod # map { 0 : ADDR . # }
add rule F kube-proxy local-NAME F saddr @affinity-NAME goto endpoint-NAME
add rule F kube-proxy local-NAME numgen random mod # vmap { 0 : goto endpoint-NAME }
add rule F kube-proxy endpoint-NAME update @affinity-NAME { F saddr }
add rule F kube-proxy endpoint-NAME meta l4proto P dnat to TO
add rule F kube-proxy external-NAME mark set mark or MARK comment "masquerade"
add rule F kube-proxy external-NAME F saddr NET goto service-NAME comment "short-circuit pod traffic"
add rule F kube-proxy external-NAME iifname DEVICE goto service-NAME comment "short-circuit pod traffic"
add rule F kube-proxy external-NAME fib saddr type local mark set mark or MARK comment "masquerade local traffic"
add rule F kube-proxy external-NAME fib saddr type local goto service-NAME comment "short-circuit local traffic"
add rule F kube-proxy external-NAME goto service-NAME
add rule F kube-proxy external-NAME goto local-NAME
add rule F kube-proxy firewall-NAME F saddr != { NET } drop'
# What only the file of a delta may do beside that.
NFT_DELTA_COMMANDS='
delete table F kube-proxy
delete set F kube-proxy nodeport-ips
delete set F kube-proxy affinity-NAME
delete map F kube-proxy localhost-nodeport-reject-ports
delete counter F kube-proxy localhost-nodeport-rejected-P
delete element F kube-proxy cluster-ips { ADDR }
delete element F kube-proxy nodeport-ips { ADDR }
delete element F kube-proxy hairpin-connections { ADDR . ADDR . P . # }
delete element F kube-proxy service-ips { ADDR . P . # }
delete element F kube-proxy service-nodeports { P . # }
delete element F kube-proxy firewall-ips { ADDR . P . # }
delete element F kube-proxy no-endpoint-services { ADDR . P . # }
delete element F kube-proxy no-endpoint-nodeports { P . # }
delete element F kube-proxy localhost-nodeport-reject-ports { P . # }'

nftables_guard() {
    [ -e "$bundle/nftables.nft" ] || die 2 "nftables.nft: not in the bundle"
    printf '%s\n' "$NFT_COMMANDS" >"$work/allowed"
    [ "$kind" = Bundle ] || printf '%s\n' "$NFT_DELTA_COMMANDS" >>"$work/allowed"
    guard_lines nftables.nft '
    # A word of a command with what may vary replaced: p is the word before it, q the one before that.
    function general(w, p, q) {
        # What stands for something else below is nothing by itself.
        if (w ~ /^(F|P|#|ADDR|NET|TO|MARK|DEVICE|SERVICE|SECONDS|TYPE|GENERATION|REJECTED|LOOPBACK)$/ || w ~ /-(NAME|P)$/) return "?"
        if (w == f) return "F"
        if (w in WORD) return WORD[w]
        if (w ~ /^@?(service|local|external|firewall|endpoint|affinity)-'"$H4$H4"'-[a-z0-9._\/-]+$/) { sub(/-.*/, "-NAME", w); return w }
        if (w ~ /^[0-9]+$/) return p == "." || p == "," || p == "mod" ? "#" : w
        if (p == "daddr" || p == "!=" && q == "daddr") return w == LOOPBACK[f] ? "LOOPBACK" : w
        if (f == "ip") {
            if (w ~ /^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$/) return "ADDR"
            if (w ~ /^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+\/[0-9]+$/) return "NET"
            if (w ~ /^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+:[0-9]+$/) return "TO"
        } else {
            if (w ~ /^[0-9a-f:.]*:[0-9a-f:.]+$/) return "ADDR"
            if (w ~ /^[0-9a-f:.]*:[0-9a-f:.]+\/[0-9]+$/) return "NET"
            if (w ~ /^\[[0-9a-f:.]*:[0-9a-f:.]+\]:[0-9]+$/) return "TO"
        }
        if (w ~ /^0x0*[1248]0*$/ && length(w) == 10) return "MARK"
        if (p == "iifname" || p == "!=" && q == "iifname") return w ~ /^"[A-Za-z0-9_.@-]+\*?"$/ ? "DEVICE" : w
        if (p == "comment" && $2 == "element") return w ~ /^"[a-z0-9.:\/-]+"$/ && length(w) <= 130 ? "SERVICE" : w
        if (w ~ /^[0-9]+s$/) return "SECONDS"
        return w
    }
    BEGIN {
        while ((getline row < "'"$work/allowed"'") > 0) {
            allowed[row] = 1
            split(row, word, " ")
            if (word[1] == "add" && word[2] ~ /^(chain|set|map)$/ && word[5] !~ /^affinity/) allowed["flush " word[2] " F kube-proxy " word[5]] = 1
        }
        LOOPBACK["ip"] = "127.0.0.0/8"; LOOPBACK["ip6"] = "::1"
        n = split("tcp udp sctp", word, " ")
        for (i = 1; i <= n; i++) {
            WORD[word[i]] = "P"
            WORD["localhost-nodeport-rejected-" word[i]] = "localhost-nodeport-rejected-P"
            WORD["localhost-nodeport-reject-" word[i]] = "localhost-nodeport-reject-P"
            WORD["\"localhost-nodeport-rejected-" word[i] "\""] = "REJECTED"
        }
        WORD["\"'"$generation"'\""] = "GENERATION"
    }
    /^#/ || /^$/ { next }
    {
        f = $3
        if (f != "ip" && f != "ip6") refuse("not a command for table kube-proxy: " $0)
        WORD["ipv4_addr"] = f == "ip" ? "TYPE" : "ipv4_addr"
        WORD["ipv6_addr"] = f == "ip6" ? "TYPE" : "ipv6_addr"
        shape = $1 " " $2 " F " $4
        p = $4; q = "F"
        for (i = 5; i <= NF; i++) { shape = shape " " general($i, p, q); q = p; p = $i }
        if (index(shape, " , ")) {
            gsub(/ , # : ADDR \. #/, "", shape)
            gsub(/ , # : goto endpoint-NAME/, "", shape)
            if (shape ~ /\{ (ADDR|NET)( , (ADDR|NET))* \}/) sub(/\{ (ADDR|NET)( , (ADDR|NET))* \}/, "{ NET }", shape)
        } else if ($1 == "add" && $2 == "rule") sub(/saddr != \{ ADDR \}/, "saddr != { NET }", shape)
        if (!(shape in allowed)) refuse(reason(shape))
        if (shape ~ /GENERATION/) marked[f] = 1
        else if ($4 == "kube-proxy") used[f] = !($1 == "delete" && $2 == "table")
    }
    # Say as exactly as possible why a command is not allowed.
    function reason(shape) {
        if ($4 != "kube-proxy" && $4 != "kube-proxy-generation") return "table " $4 " is not ours"
        if (shape ~ /^add table F kube-proxy-generation/) return "the marker is not the generation of the manifest"
        return "not a command that kube-proxy would run: " $0
    }
    END { if (!refused) for (f in used) if (used[f] && !marked[f]) refuse("no marker for family " f) }'
}

# ---------------------------------------------------------------- nftables: host
NFT_FAMILIES='ip ip6'

# Run nft on a file of commands: one transaction, all or nothing. On failure $work/refused has nft's
# message and the command it is about.
nft_run() {
    nft -f "$1" >/dev/null 2>"$work/err" && return 0
    nft_refusal
}

# The generation in the kernel of a family; nothing if there is no marker.
nft_marker() { nft list table "$1" kube-proxy-generation 2>/dev/null | sed -n 's/^[[:space:]]*comment "\([0-9a-f]*\)"$/\1/p'; }

# Is there a table kube-proxy? Asked by pretending to delete it, which lists nothing.
nft_table_exists() {
    said=$(nft -c delete table "$1" kube-proxy 2>&1) && return 0
    case $said in *'No such file'*) return 1 ;; esac
    # Neither yes nor no: once more.
    nft -c delete table "$1" kube-proxy 2>/dev/null
}

nft_tables_exist() { has nft && { nft_table_exists ip || nft_table_exists ip6; }; }

# Families that a file has rules for.
nft_families_of() { [ ! -s "$1" ] || sed -n 's/^add table \(ip6\{0,1\}\) kube-proxy {.*/\1/p' "$1"; }

# Do the base chains of a family still jump to ours? A chain in use cannot be deleted, and asking for it lists
# nothing.
nft_intact() {
    for c in nodeport-endpoints-check service-endpoints-check firewall-check cluster-ips-check services masquerading; do
        printf 'delete chain %s kube-proxy %s\n' "$1" "$c"
    done >"$work/probe"
    ! nft -c -f "$work/probe" 2>"$work/err" && [ "$(grep -c -i 'resource busy' "$work/err")" -eq 6 ]
}

# Is the kernel's table what the recorded bundle says, by a look at markers and jumps?
# Not if a run was cut short: then chains may be there that no bundle names.
nft_is_recorded() {
    recorded_bundle
    [ "$r_mode" = nftables ] && [ ! -e "$STATE/unsettled" ] && [ -n "$recorded" ] || return 1
    nft_holds "$r_generation" "$recorded/nftables.nft"
}

# Has every family of a file ($2) the marker ($1), and no other family any?
nft_marked() {
    # A file that cannot be read is not one without families: an empty kernel would fit it.
    wanted=$(nft_families_of "$2") || return 1
    for f in $NFT_FAMILIES; do
        marker=
        for family in $wanted; do [ "$family" != "$f" ] || marker=$1; done
        [ "$(nft_marker "$f")" = "$marker" ] || return 1
    done
}

# The same, and the jumps are there.
nft_holds() {
    nft_marked "$1" "$2" || return 1
    for f in $wanted; do nft_intact "$f" || return 1; done
}

# Our tables as the kernel lists them. Fails if one is there that cannot be listed: it would be taken for one that is not.
nft_list() {
    nft list tables >"$work/tables" 2>"$work/err" || return 1
    while read -r _ f t; do
        case $f/$t in ip/kube-proxy | ip6/kube-proxy) nft list table "$f" kube-proxy 2>"$work/err" || return 1 ;; esac
    done <"$work/tables"
}

# The same as facts, in $work/nft.actual.
nft_read() {
    nft_list >"$work/nft.listing" && nft_facts <"$work/nft.listing" >"$work/nft.actual" && return 0
    die 4 "the kernel's tables cannot be read, nothing was changed: $(cat "$work/err")"
}

# A listing on stdin as facts, one a line, tab separated: family, kind of object, name, and
#   H and its attributes    R and a rule, in order    E and an element
# What changes by itself is left out: sessions in affinity sets, the size that the kernel gives them, counters.
nft_facts() {
    awk '
        BEGIN { OFS = "\t" }
        function elements(text,   n, i, part) {
            inside = !sub(/ *\}$/, "", text)
            if (name ~ /^affinity-/) return
            n = split(text, part, ",")
            for (i = 1; i <= n; i++) {
                gsub(/^[ \t]+|[ \t]+$/, "", part[i])
                if (part[i] != "") print family, kind, name, "E", part[i]
            }
        }
        inside { elements($0); next }
        /^table / { family = $2; table = ""; next }
        /^\}$/ { print family, "table", "kube-proxy", "H", table; next }
        /^\t(comment "|flags )/ { table = table substr($0, 2) ";"; next }
        /^\t[a-z]+ .*\{$/ { kind = $1; name = $2; head = ""; next }
        /^\t\}$/ { print family, kind, name, "H", head; next }
        /^\t\telements = \{/ { sub(/^\t\telements = \{/, ""); elements($0); next }
        /^\t\t/ {
            sub(/^\t\t/, "")
            if (kind == "chain" && !/^type .* hook / && !/^comment "/) print family, kind, name, "R", $0
            else if (!/^size / && !/^packets /) head = head $0 ";"
        }'
}

# The commands of a file as facts of the same form.
nft_file_facts() {
    awk '
        BEGIN { OFS = "\t" }
        $1 != "add" || $4 != "kube-proxy" { next }
        $2 == "rule" { print $3, "chain", $5, "R", substr($0, length($3) + length($5) + 22); next }
        $2 == "element" { text = substr($0, length($3) + length($5) + 27); print $3, kind[$5], $5, "E", substr(text, 1, length(text) - 2); next }
        $2 == "table" { print $3, $2, $4, "H", substr($0, length($3) + 23); next }
        { if ($2 != "chain") kind[$5] = $2; print $3, $2, $5, "H", substr($0, length($2) + length($3) + length($5) + 18) }' "$1"
}

# ---------------------------------------------------------------- nftables: plan
# A plan is the directory $work/nft:
#   tasks     what differs, one object or element a line
#   stage.*   transactions that make chains nothing refers to yet
#   switch    the transaction that changes what happens to packets, the marker included
#   unstage   takes back what was staged
#   drop      chains that nothing refers to any more, for a transaction after the switch: up to Linux 6.1
#             a chain counts as used while the element that led to it is being deleted
# and counts and detail in $work/plan.FAMILY, as for iptables.

# Compare facts: what is there ($1) with what is wanted ($2), into $work/nft/tasks, counts and detail.
nft_diff() {
    mkdir -p "$work/plan.4" "$work/plan.6" "$work/nft"
    awk -F '\t' -v work="$work" '
    function tell(f, what, name, text,   service) {
        service = name
        if (match(text, /goto [a-z]+-[A-Z2-7]+-[a-z0-9.-]+\/[a-z0-9.-]+/)) service = substr(text, RSTART, RLENGTH)
        else if (match(text, /comment "[a-z0-9.-]+\/[a-z0-9.-]+/)) service = "x-X-" substr(text, RSTART + 9, RLENGTH - 9)
        if (!match(service, /-[A-Z2-7X]+-[a-z0-9.-]+\/[a-z0-9.-]+/)) service = ""
        else { service = substr(service, RSTART + 1, RLENGTH - 1); sub(/^[A-Z2-7X]+-/, "", service) }
        print what "\tkube-proxy\t" name "\t" service "\t" text > (work "/plan." (f == "ip" ? 4 : 6) "/detail")
    }
    function task(line) { print line > TASKS }
    function key_of(element) { sub(/ (comment "[^"]*" )?: .*$/, "", element); return element }
    # Name the rules that differ in a chain.
    function explain(f, name, key,   i, n, m, a, b, left, told) {
        n = split(rules[key], a, "\n")
        m = split(wrules[key], b, "\n")
        for (i = 2; i <= n; i++) left[a[i]]++
        for (i = 2; i <= m; i++) if (left[b[i]] > 0) left[b[i]]--; else { tell(f, "missing-rule", name, b[i]); told = 1 }
        for (i = 2; i <= n; i++) if (left[a[i]] > 0) { left[a[i]]--; tell(f, "extra-rule", name, a[i]); told = 1 }
        if (!told) tell(f, "order", name, "")
    }
    BEGIN { TASKS = work "/nft/tasks" }
    { key = $1 SUBSEP $2 SUBSEP $3 }
    pass == 1 && $4 == "H" { head[key] = $5; order[++n] = key; family[$1] = 1; next }
    pass == 1 && $4 == "R" { rules[key] = rules[key] "\n" $5; next }
    # An element may be told more than once, by each port of a Service.
    pass == 1 { if (!((key, $5) in element)) { element[key, $5] = 1; eorder[++en] = key SUBSEP $5 } next }
    $4 == "H" { whead[key] = $5; worder[++wn] = key; wfamily[$1] = 1; next }
    $4 == "R" { wrules[key] = wrules[key] "\n" $5; next }
    !((key, $5) in welement) { welement[key, $5] = 1; weorder[++wen] = key SUBSEP $5 }
    END {
        for (f in family) if (!(f in wfamily)) task("leave\t" f)
        for (f in wfamily) if (!(f in family)) task("table\t" f)
        # A table whose sets or base chains are made differently is made anew.
        for (i = 1; i <= wn; i++) {
            key = worder[i]
            split(key, p, SUBSEP)
            if (key in head && head[key] != whead[key] && p[3] !~ /^affinity-/ && !(p[1] in anew)) { anew[p[1]] = 1; task("anew\t" p[1]) }
        }
        for (i = 1; i <= wn; i++) {
            key = worder[i]
            split(key, p, SUBSEP); f = p[1]
            if (!(key in head)) {
                if (p[2] == "chain") added[f]++
                tell(f, "missing-" p[2], p[3], "")
                if (!(f in anew)) task("new\t" f "\t" p[2] "\t" p[3])
            } else if (p[2] == "chain" && rules[key] != wrules[key]) {
                changed[f]++
                explain(f, p[3], key)
                if (!(f in anew)) task("set\t" f "\tchain\t" p[3])
            } else if (head[key] != whead[key]) {
                tell(f, "attributes", p[3], whead[key])
                if (!(f in anew)) task("new\t" f "\t" p[2] "\t" p[3])
            } else if (p[2] == "chain") same[f]++
        }
        for (i = 1; i <= n; i++) {
            key = order[i]
            split(key, p, SUBSEP); f = p[1]
            if (key in whead) continue
            if (p[2] == "chain") removed[f]++
            tell(f, "stale-" p[2], p[3], "")
            if (f in wfamily && !(f in anew)) task("gone\t" f "\t" p[2] "\t" p[3])
        }
        for (i = 1; i <= en; i++) {
            if (eorder[i] in welement) continue
            split(eorder[i], p, SUBSEP); f = p[1]
            fewer[f]++
            tell(f, "extra-element", p[3], p[4])
            if ((f, p[2], p[3]) in whead && !(f in anew)) task("del\tdelete element " f " kube-proxy " p[3] " { " key_of(p[4]) " }")
        }
        for (i = 1; i <= wen; i++) {
            if (weorder[i] in element) continue
            split(weorder[i], p, SUBSEP); f = p[1]
            more[f]++
            tell(f, "missing-element", p[3], p[4])
            if (!(f in anew)) task("add\tadd element " f " kube-proxy " p[3] " { " p[4] " }")
        }
        printf "" > TASKS
        for (i = 4; i <= 6; i += 2) {
            f = i == 4 ? "ip" : "ip6"
            printf "%d %d %d %d %d %d\n", added[f], changed[f], removed[f], same[f], more[f], fewer[f] > (work "/plan." i "/counts")
            printf "" > (work "/plan." i "/detail")
        }
    }' pass=1 "$1" pass=2 "$2"
}

# Turn tasks ($1) and the wanted file ($2) into transactions in a directory ($3). The file is in an order that
# works from any state; this takes the commands that are needed, in the same order.
nft_write() {
    awk -v out="$3" -v CHUNK="$CHUNK" '
    function stage(line) { print line > STAGE; lines++ }
    # A chunk ends where a Service ends, as rules refer to chains of their own Service.
    function cut() { if (lines >= CHUNK) { close(STAGE); STAGE = sprintf("%s/stage.%04d", out, ++chunk); lines = 0 } }
    function staged(name) { return many && index(name, "/") }
    function emit(line, name) { if (staged(name)) stage(line); else print line > SWITCH }
    BEGIN { STAGE = out "/stage.0000"; SWITCH = out "/switch"; DROP = out "/drop"; UNSTAGE = out "/unstage" }
    pass == 1 {
        split($0, t, "\t")
        if (t[1] == "new") { need[t[2], t[3], t[4]] = "new"; fresh++ }
        else if (t[1] == "set") need[t[2], t[3], t[4]] = "set"
        else if (t[1] == "gone") { gone[++ngone] = "F " t[2] " " t[3] " " t[4]; }
        else if (t[1] == "del") del[++ndel] = t[2]
        else if (t[1] == "add") add[++nadd] = t[2]
        else if (t[1] == "table") table[t[2]] = 1
        else if (t[1] == "anew") anew[t[2]] = 1
        else if (t[1] == "leave") leave[t[2]] = 1
        next
    }
    FNR == 1 {
        many = fresh > 300
        for (i = 1; i <= ndel; i++) print del[i] > SWITCH
        for (f in anew) print "delete table " f " kube-proxy" > SWITCH
    }
    /^#/ { cut(); next }
    $4 != "kube-proxy" || $3 in anew { if (NF) print > SWITCH; next }
    $2 == "table" {
        if (!($3 in table)) next
        # Sets and maps before anything else: the kernel finds them by walking a list.
        if (many) stage($0); else print > SWITCH
        next
    }
    $2 == "element" { next }
    $2 == "rule" { if (($3, "chain", $5) in need) emit($0, $5); next }
    !(($3, $2, $5) in need) { next }
    $1 == "flush" { if (need[$3, $2, $5] == "set") print > SWITCH; next }
    need[$3, $2, $5] == "set" { next }
    $2 != "chain" && many && $3 in table { stage($0); next }
    {
        emit($0, $5)
        if (staged($5)) made[++nmade] = $0
    }
    END {
        for (i = 1; i <= nadd; i++) print add[i] > SWITCH
        for (i = 1; i <= ngone; i++) {
            split(gone[i], g, " ")
            if (g[3] != "chain") continue
            print "flush chain " g[2] " kube-proxy " g[4] > SWITCH
            print "delete chain " g[2] " kube-proxy " g[4] > DROP
        }
        for (i = 1; i <= ngone; i++) {
            split(gone[i], g, " ")
            if (g[3] != "chain") print "delete " g[3] " " g[2] " kube-proxy " g[4] > SWITCH
        }
        for (f in leave) {
            print "add table " f " kube-proxy\ndelete table " f " kube-proxy" > SWITCH
            print "add table " f " kube-proxy-generation\ndelete table " f " kube-proxy-generation" > SWITCH
        }
        # Made and flushed first, as not all of it may have been loaded.
        for (f in table) print "add table " f " kube-proxy\ndelete table " f " kube-proxy" > UNSTAGE
        for (pass = 1; pass <= 2; pass++) for (i = 1; i <= nmade; i++) {
            split(made[i], g, " ")
            if (g[3] in table) continue
            if (pass == 1) print made[i] (g[2] == "chain" ? "\nflush chain " g[3] " kube-proxy " g[5] : "") > UNSTAGE
            else print "delete " g[2] " " g[3] " kube-proxy " g[5] > UNSTAGE
        }
    }' pass=1 "$1" pass=2 "$2"
}

# ---------------------------------------------------------------- nftables: commit

# Carry out the plan. If anything is refused, nothing has changed and the reason is in $work/refused.
found_unsettled=    # by another run, and not for this one to forget
nft_carry_out() {
    [ ! -e "$STATE/unsettled" ] || found_unsettled=1
    : >"$STATE/unsettled"
    for f in "$work/nft"/stage.*; do
        [ -e "$f" ] || continue
        nft_run "$f" || { nft_unstage; return 1; }
    done
    trap '' HUP INT TERM
    # Both families switch in one transaction: all of it, or the kernel stays as it was.
    if ! nft_check "$work/nft/switch" || { ! nft_run "$work/nft/switch" && ! nft_taken; }; then
        nft_unstage
        return 1
    fi
    nft_drop "$work/nft/drop"
}

# The switch failed. Has the kernel taken it all the same? A tool can die on its way back. Without the new marker it has
# not; with it, which may have been there before, a listing tells.
nft_taken() {
    nft_marked "$generation" "$bundle/nftables.nft" || return 1
    mkdir "$work/tried"
    mv "$work/nft" "$work/plan.4" "$work/plan.6" "$work/tried"
    taken=
    if (nft_base=listed && nft_read && nftables_compare) >/dev/null 2>&1; then
        # Chains to which nothing leads any more are dropped after the switch.
        if grep -q -v '^gone' "$work/nft/tasks"; then taken=no; else taken=yes; fi
    fi
    rm -rf "$work/nft" "$work/plan.4" "$work/plan.6"
    mv "$work/tried"/* "$work"
    [ -n "$taken" ] || left_unfinished "whether the kernel has the new rules could not be told"
    [ "$taken" = yes ]
}

# Like nft_run, but changes nothing.
nft_check() {
    nft -c -f "$1" >/dev/null 2>"$work/err" && return 0
    nft_refusal
}

# Put nft's message and the command it is about into $work/refused.
nft_refusal() {
    sed -n -e 's/^.*Error: //p' -e '/^[a-z]/p' "$work/err" | sed -n '1,2p' | tr '\n' ' ' | cut -c 1-600 >"$work/refused"
    return 1
}

nft_unstage() {
    mv "$work/refused" "$work/reason"
    if [ -s "$work/nft/unstage" ] && ! nft_run "$work/nft/unstage"; then left_unfinished "what was staged could not be removed: $(cat "$work/refused")"
    elif [ -z "$unfinished$found_unsettled" ]; then rm -f "$STATE/unsettled"
    fi
    mv "$work/reason" "$work/refused"
}

# Delete chains that nothing refers to any more: those in $1, and those that an earlier run could not delete.
nft_drop() {
    if [ -s "$STATE/stale" ] && awk 'NR == FNR { if ($2 == "chain") wanted[$3, $5] = 1; next } !(($3, $5) in wanted)' \
        "$bundle/nftables.nft" "$STATE/stale" >"$work/stale"
    then
        rm -f "$STATE/stale"
        nft_drop_chains "$work/stale"
    fi
    nft_drop_chains "$1"
    [ ! -s "$STATE/stale" ] || warn "$(wc -l <"$STATE/stale") stale chains stay, empty, until the next run: $(cat "$work/refused")"
}

# Where the kernel is not ready yet it is asked again, now and at the next run; until then they are empty.
nft_drop_chains() {
    if [ ! -s "$1" ] || nft_run "$1"; then return 0; fi
    sleep 1
    if nft_run "$1"; then return 0; fi
    while read -r line; do
        printf '%s\n' "$line" >"$work/one"
        nft_run "$work/one" || grep -q 'No such file' "$work/err" || printf '%s\n' "$line" >>"$STATE/stale"
    done <"$1"
}

# ---------------------------------------------------------------- nftables: mode

# How the kernel is known: by the recorded bundle, which costs no listing, as empty, or by a listing.
nft_base=

nftables_read() {
    has nft || return 0
    if [ -z "$verify" ] && nft_is_recorded; then nft_base=recorded
    else
        nft_read
        nft_base=empty
        [ ! -s "$work/nft.listing" ] || nft_base=listed
    fi
}

nftables_preflight() {
    need nft nftables
    version=$(nft --version 2>/dev/null | sed -n 's/^nftables v\([0-9.]*\).*/\1/p')
    printf '%s\n' "$version" | awk -F . '{ exit $1 * 10000 + $2 * 100 + $3 < 10001 }' || die 3 "missing tool: nft 1.0.1 or newer (package nftables), this is $version"
    nft_probe
    if conntrack_pending; then need conntrack conntrack; fi
}

# Every kind of object and rule that kube-proxy makes, tried without changing anything; ends with 3 if one is missing.
NFT_FEATURES='nf_tables with comments on tables|add table F akp-probe { comment "probe" ; }
comments on chains|add chain F akp-probe c { comment "probe" ; }
nat chains (module nft_chain_nat)|add chain F akp-probe n { type nat hook postrouting priority 100 ; }
verdict maps with concatenated keys|add map F akp-probe m { type TYPE . inet_proto . inet_service : verdict ; comment "probe" ; }
dynamic sets with timeouts|add set F akp-probe s { type TYPE ; flags dynamic,timeout ; timeout 60s ; }
set updates from rules|add rule F akp-probe c update @s { F saddr }
fib lookups (module nft_fib)|add rule F akp-probe c fib saddr type local return
conntrack matches (module nft_ct)|add rule F akp-probe c ct state new ct status dnat return
reject (module nft_reject)|add rule F akp-probe c reject
random maps of address and port (nft 1.0.1 and Linux 5.13)|add rule F akp-probe c meta l4proto tcp dnat F addr . port to numgen random mod 2 map { 0 : ADDR . 80 , 1 : ADDR . 81 }
random verdict maps (module nft_numgen)|add rule F akp-probe c numgen random mod 2 vmap { 0 : goto n2 , 1 : goto n2 }
masquerading (module nft_masq)|add rule F akp-probe n masquerade fully-random
lookups in verdict maps|add rule F akp-probe c F daddr . meta l4proto . th dport vmap @m'
nft_probe() {
    for f in $(nft_families_of "$bundle/nftables.nft"); do
        case $f in ip) to=s/TYPE/ipv4_addr/\;s/ADDR/192.0.2.1/g ;; ip6) to=s/TYPE/ipv6_addr/\;s/ADDR/2001:db8::1/g ;; esac
        printf '%s\n' "$NFT_FEATURES" | sed -e "s/ F / $f /g" -e "s/{ F /{ $f /" -e "$to" >"$work/features"
        { sed -n 's/^[^|]*|\(add table.*\)/\1/p' "$work/features"; echo "add chain $f akp-probe n2"; sed -e 1d -e 's/^[^|]*|//' "$work/features"; } >"$work/probe"
        nft_check "$work/probe" && continue
        # Which one? Each needs those before it to be declared.
        : >"$work/probe"
        while IFS='|' read -r what command; do
            printf '%s\n' "$command" >>"$work/probe"
            case $command in 'add table'*) printf 'add chain %s akp-probe n2\n' "$f" >>"$work/probe" ;; esac
            nft_check "$work/probe" || die 3 "missing kernel feature: $what, family $f: $(cat "$work/refused")"
        done <"$work/features"
    done
}

nftables_compare() {
    rm -rf "$work/nft" "$work/plan.4" "$work/plan.6"
    mkdir "$work/nft"
    nft_file_facts "$bundle/nftables.nft" >"$work/nft.file" || die 3 "nftables.nft cannot be read (is ${TMPDIR:-/tmp} full?)"
    case $nft_base in
        recorded)
            recorded_bundle
            nft_file_facts "$recorded/nftables.nft" >"$work/nft.actual" || die 3 "the recorded bundle cannot be read (is ${TMPDIR:-/tmp} full?)"
            nft_diff "$work/nft.actual" "$work/nft.file"
            ;;
        listed)
            if in_sandbox true; then
                { nft_list_of_bundle >"$work/nft.loaded" && nft_facts <"$work/nft.loaded" >"$work/nft.wanted" && [ -s "$work/nft.wanted" ]; } ||
                    die 3 "the bundle could not be loaded into a network namespace of its own: $(head -n 3 "$work/err" | tr '\n' ' ')"
            else
                # Nothing to compare with: what is written differently counts as different, and is written again.
                [ "$verb" != status ] || die 3 "missing tool: unshare (package util-linux), or the right to use it, which a comparison needs"
                awk -F '\t' -v OFS='\t' '{ key = $1 FS $2 FS $3 }
                    FNR == NR { if ($4 == "H") head[key] = $5; next }
                    $4 == "H" && key in head && $3 !~ /^affinity-/ { $5 = head[key] }
                    { print }' "$work/nft.actual" "$work/nft.file" >"$work/nft.wanted"
            fi
            nft_diff "$work/nft.actual" "$work/nft.wanted"
            ;;
        *) nft_diff /dev/null "$work/nft.file" ;;
    esac || die 3 "the comparison of rules failed (is ${TMPDIR:-/tmp} full?)"
    families=$(nft_families_of "$bundle/nftables.nft") || die 3 "nftables.nft cannot be read"
    for f in $NFT_FAMILIES; do
        stays=
        for each in $families; do [ "$each" != "$f" ] || stays=1; done
        if [ -z "$stays" ] && [ -n "$(nft_marker "$f")" ]; then printf 'leave\t%s\n' "$f" >>"$work/nft/tasks"; fi
    done
    { nft_write "$work/nft/tasks" "$bundle/nftables.nft" "$work/nft" && room; } || die 3 "the plan could not be written (is ${TMPDIR:-/tmp} full?)"
}

# The tables of the bundle as this kernel and this nft list them: loaded into a network namespace of their own. A
# listing cannot be compared with the commands that led to it, only with another listing.
nft_list_of_bundle() {
    wanted=$(nft_families_of "$bundle/nftables.nft") && nft_diff /dev/null "$work/nft.file" || return 1
    rm -rf "$work/sandbox"
    mkdir "$work/sandbox"
    nft_write "$work/nft/tasks" "$bundle/nftables.nft" "$work/sandbox" || return 1
    # A family that cannot be listed would be one that nobody wants.
    # shellcheck disable=SC2086 # names
    unshare -n sh -c '
        for f in "$1"/stage.* "$1"/switch; do [ ! -e "$f" ] || nft -f "$f" || exit 1; done
        shift
        for f; do nft list table "$f" kube-proxy || exit 1; done' sh "$work/sandbox" $wanted 2>"$work/err" || return 1
    rm -rf "$work/sandbox" "$work/plan.4" "$work/plan.6" "$work/nft/tasks"
}

nftables_pending() { [ -s "$work/nft/tasks" ] || ! nft_marked "$generation" "$bundle/nftables.nft"; }

nftables_commit() {
    if nft_carry_out; then return 0; fi
    [ "$nft_base" = recorded ] || return 1
    # The kernel may not be what was recorded after all. A listing tells.
    cp "$work/refused" "$work/first"
    nft_base=listed
    if (nft_read && nftables_compare) >/dev/null 2>&1 && nft_carry_out; then
        # The listing had what the first try could not remove.
        unfinished=
        return 0
    fi
    mv "$work/first" "$work/refused"
    return 1
}

nftables_counts() {
    comma=
    for fam in $FAMILIES; do
        read -r new other gone same more fewer <"$work/plan.$fam/counts"
        printf '%s"ipv%s": {"added": %d, "changed": %d, "removed": %d, "same": %d, "elementsAdded": %d, "elementsRemoved": %d}' \
            "$comma" "$fam" "$new" "$other" "$gone" "$same" "$more" "$fewer"
        comma=', '
    done
}

nftables_details() { iptables_details; }

nftables_current() { nft_holds "$generation" "$bundle/nftables.nft"; }

nftables_expected() { nft_families_of "$bundle/nftables.nft" | sed -e 's/^ip6$/ipv6 kube-proxy/' -e 's/^ip$/ipv4 kube-proxy/'; }

nftables_markers() {
    for f in $NFT_FAMILIES; do
        marker=$(nft_marker "$f")
        case $f in ip) name=ipv4 ;; ip6) name=ipv6 ;; esac
        [ -z "$marker" ] || printf '%s kube-proxy %s\n' "$name" "$marker"
    done
}

nftables_remember() { :; }

# Both tables of both families are gone, or were not there.
nftables_remove() {
    for f in $NFT_FAMILIES; do
        for t in kube-proxy kube-proxy-generation; do printf 'add table %s %s\ndelete table %s %s\n' "$f" "$t" "$f" "$t"; done
    done >"$work/remove"
    if foreign_noted nft; then cat "$STATE/foreign/nft" >>"$work/remove" || { echo "what was there before cannot be read" >"$work/refused"; return 1; }; fi
    nft_run "$work/remove" || return 1
    rm -f "$STATE/stale"
}

# Read the kernel again, where that is cheap enough to be done after every change.
nftables_reread() {
    [ "$(wc -c <"$bundle/nftables.nft")" -le $((GLIMPSE_LIMIT / 5)) ] || return 1
    verify=1
    nftables_read
}

# Everything of ours that the kernel holds, as lines; different whenever any of it is.
nftables_glimpse() {
    for f in $NFT_FAMILIES; do nft list table "$f" kube-proxy 2>/dev/null || :; done | nft_facts
    nftables_markers
}

