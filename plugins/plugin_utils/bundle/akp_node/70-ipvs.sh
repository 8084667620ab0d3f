# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- ipvs: guard
# Ours are the device kube-ipvs0 and all its addresses, the sets below, the chains of mode ipvs, and the virtual
# servers that the bundle, the recorded bundle, the device or the sets name.

# Sets and their types; those of IPv6 have KUBE-6- in front and are cut to 31 characters.
IPVS_SETS='KUBE-LOOP-BACK hash:ip,port,ip
KUBE-CLUSTER-IP hash:ip,port
KUBE-EXTERNAL-IP hash:ip,port
KUBE-EXTERNAL-IP-LOCAL hash:ip,port
KUBE-LOAD-BALANCER hash:ip,port
KUBE-LOAD-BALANCER-FW hash:ip,port
KUBE-LOAD-BALANCER-LOCAL hash:ip,port
KUBE-LOAD-BALANCER-SOURCE-IP hash:ip,port,ip
KUBE-LOAD-BALANCER-SOURCE-CIDR hash:ip,port,net
KUBE-NODE-PORT-TCP bitmap:port
KUBE-NODE-PORT-LOCAL-TCP bitmap:port
KUBE-NODE-PORT-UDP bitmap:port
KUBE-NODE-PORT-LOCAL-UDP bitmap:port
KUBE-NODE-PORT-SCTP-HASH hash:ip,port
KUBE-NODE-PORT-LOCAL-SCTP-HASH hash:ip,port
KUBE-HEALTH-CHECK-NODE-PORT bitmap:port
KUBE-IPVS-IPS hash:ip'

# Every rule that a bundle may hold, by table and chain. @ is a comment, MARK the mark, LOCAL a test for local pods.
IPVS_RULES='nat KUBE-SERVICES -s LOOP -j RETURN
nat KUBE-SERVICES @ -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
nat KUBE-SERVICES @ -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
nat KUBE-SERVICES @ -m set --match-set KUBE-CLUSTER-IP src,dst -j KUBE-MARK-MASQ
nat KUBE-SERVICES LOCAL @ -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
nat KUBE-SERVICES @ -m set --match-set KUBE-EXTERNAL-IP dst,dst -j KUBE-MARK-MASQ
nat KUBE-SERVICES @ -m set --match-set KUBE-EXTERNAL-IP dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT
nat KUBE-SERVICES @ -m set --match-set KUBE-EXTERNAL-IP dst,dst -m addrtype --dst-type LOCAL -j ACCEPT
nat KUBE-SERVICES @ -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT
nat KUBE-SERVICES @ -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -m addrtype --dst-type LOCAL -j ACCEPT
nat KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
nat KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
nat KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
nat KUBE-LOAD-BALANCER @ -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
nat KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p tcp @ -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN
nat KUBE-NODE-PORT -p tcp @ -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p udp @ -m set --match-set KUBE-NODE-PORT-LOCAL-UDP dst -j RETURN
nat KUBE-NODE-PORT -p udp @ -m set --match-set KUBE-NODE-PORT-UDP dst -j KUBE-MARK-MASQ
nat KUBE-NODE-PORT -p sctp @ -m set --match-set KUBE-NODE-PORT-LOCAL-SCTP-HASH dst,dst -j RETURN
nat KUBE-NODE-PORT -p sctp @ -m set --match-set KUBE-NODE-PORT-SCTP-HASH dst,dst -j KUBE-MARK-MASQ
nat KUBE-POSTROUTING @ -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
nat KUBE-POSTROUTING -m mark ! --mark MARK/MARK -j RETURN
nat KUBE-POSTROUTING -j MARK --set-xmark MARK/0x0
nat KUBE-POSTROUTING @ -j MASQUERADE --random-fully
nat KUBE-MARK-MASQ -j MARK --set-xmark MARK/MARK
filter KUBE-PROXY-FIREWALL @ -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
filter KUBE-SOURCE-RANGES-FIREWALL @ -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN
filter KUBE-SOURCE-RANGES-FIREWALL @ -m set --match-set KUBE-LOAD-BALANCER-SOURCE-IP dst,dst,src -j RETURN
filter KUBE-SOURCE-RANGES-FIREWALL -j DROP
filter KUBE-FORWARD @ -m mark --mark MARK/MARK -j ACCEPT
filter KUBE-FORWARD @ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
filter KUBE-NODE-PORT @ -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
filter KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
filter KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
filter KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
filter KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN
filter KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
filter KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT --reject-with UNREACH
filter KUBE-IPVS-OUT-FILTER -s HOST -m ipvs --vproto # --vaddr ADDR --vport # -j DROP'
export IPVS_SETS IPVS_RULES

# awk: TYPE[set] and INET[set] of our sets, and allowed(table, chain, rule) in a family, 4 or 6.
AWK_IPVS='
function load_ipvs(   i, n, row, word, six) {
    n = split(ENVIRON["IPVS_SETS"], row, "\n")
    for (i = 1; i <= n; i++) {
        split(row[i], word, " ")
        six = substr("KUBE-6-" substr(word[1], 6), 1, 31)
        TYPE[word[1]] = TYPE[six] = word[2]
        INET[word[1]] = "inet"; INET[six] = "inet6"
        FOUR[six] = word[1]
    }
    n = split(ENVIRON["IPVS_RULES"], row, "\n")
    for (i = 1; i <= n; i++) RULE[row[i]] = 1
}
function allowed(fam, t, c, r,   set) {
    # What stands for something else below is nothing by itself.
    if (r ~ /-s (LOOP|HOST) |^LOCAL |MARK\/|UNREACH|ADDR|#/) return 0
    if (match(r, /--match-set [^ ]+ /)) {
        set = substr(r, RSTART + 12, RLENGTH - 13)
        if (INET[set] != (fam == 4 ? "inet" : "inet6")) return 0
        if (fam == 6) r = substr(r, 1, RSTART + 11) FOUR[set] substr(r, RSTART + RLENGTH - 1)
    }
    sub(fam == 4 ? "^-s 127[.]0[.]0[.]0/8 " : "^-s ::1/128 ", "-s LOOP ", r)
    sub(/^! (-s [0-9a-f.:]+\/[0-9]+|-i [A-Za-z0-9_.-]+\+?) @/, "LOCAL @", r)
    sub(/0x[1248]0*\/0x[1248]0* /, "MARK/MARK ", r)
    sub(/0x[1248]0*\/0x[1248]0*$/, "MARK/MARK", r)
    sub(/0x[1248]0*\/0x0$/, "MARK/0x0", r)
    sub(fam == 4 ? "icmp-port-unreachable$" : "icmp6-port-unreachable$", "UNREACH", r)
    if (c == "KUBE-IPVS-OUT-FILTER") {
        sub(fam == 4 ? "^-s [0-9.]+/32 " : "^-s [0-9a-f.:]+/128 ", "-s HOST ", r)
        sub(fam == 4 ? "--vaddr [0-9.]+ " : "--vaddr [0-9a-f.:]+ ", "--vaddr ADDR ", r)
        sub(/--vproto [0-9]+ /, "--vproto # ", r)
        sub(/--vport [0-9]+ /, "--vport # ", r)
    }
    return (t " " c " " r) in RULE
}
BEGIN { load_ipvs() }
'

# What a line of ipset.rules, ipvs.rules, ip.batch and ipvs.conf may be.
ipvs_guard() {
    set --
    for name in iptables.rules ip6tables.rules ipset.rules ipvs.rules ip.batch ipvs.conf; do
        if [ -e "$bundle/$name" ]; then set -- "$@" "pass=$name" "$bundle/$name"; fi
    done
    for name in ipset.rules ipvs.rules ip.batch; do
        [ -e "$bundle/$name" ] || [ "$kind" = Delta ] || die 2 "$name: not in the bundle"
    done
    # A bundle creates what it adds to; a delta adds to, edits, and deletes what is there.
    why=$(awk -v DELTA="$kind" -v GENERATION="$generation" -v ports="${AKP_ACCEPT_PORTS:-1024-65535}" "$AWK_OWNED$AWK_IPVS"'
        function refuse(text) { if (!refused++) printf "%s line %d: %s\n", pass, FNR, text; exit }
        BEGIN {
            DELTA = DELTA == "Delta"
            split(ports, range, "-"); LOW = range[1] + 0; HIGH = range[2] + 0
            A["inet"] = "[0-9.]+"; A["inet6"] = "[0-9a-f:.]+"
            for (f in A) {
                # Without a 0 before it: a tool may take such a number for an octal one.
                member = A[f] ",(tcp|udp|sctp):[1-9][0-9]*"
                SHAPE["hash:ip", f] = "^" A[f] "$"
                SHAPE["hash:ip,port", f] = "^" member "$"
                SHAPE["hash:ip,port,ip", f] = "^" member "," A[f] "$"
                SHAPE["hash:ip,port,net", f] = "^" member "," A[f] "(/[0-9]+)?$"
                SHAPE["bitmap:port", f] = "^[1-9][0-9]*$"
            }
        }
        /[^ -~]/ { refuse("a character that is not printable ASCII") }

        t != "" && pass != opened { pass = opened; refuse("table " t " has no COMMIT") }
        pass ~ /tables.rules$/ && /^-A / {
            c = $2
            if (c != chain) {
                if (!((pass, t, c) in declared)) refuse(is_owned(t, c) ? "chain " c " is not declared in table " t : "chain " c " in table " t " is not ours")
                if ((pass, t, c) in filled) refuse("the rules of chain " c " do not stand together")
                filled[pass, t, c] = 1
                chain = c
            }
            r = substr($0, length(c) + 5)
            sub(/type \\\047hash ip:port\\\047"/, "type hash ip:port\"", r)
            if (r ~ /[@$`\047\\]/) refuse("a character no rule has: one of @ $ ` \047 \\")
            if (c == "KUBE-PROXY-GENERATION") { if (r != "-m comment --comment " GENERATION) refuse("the marker is not the generation of the manifest"); next }
            sub(/-m comment --comment "[^"]*"/, "@", r)
            if (!allowed(pass == "iptables.rules" ? 4 : 6, t, c, r)) refuse("not a rule that belongs in " c ": " $0)
            if (!DELTA && match(r, /-j KUBE-[A-Z0-9-]+$/) && !((pass, t, substr(r, RSTART + 3)) in declared)) refuse("jump to " substr(r, RSTART + 3) ", which this file does not declare")
            next
        }
        pass ~ /tables.rules$/ {
            if (/^#/ || /^$/) next
            if (/^:/) {
                c = substr($1, 2)
                if (!is_owned(t, c)) refuse("chain " c " in table " t " is not ours")
                if (DELTA && c == "KUBE-FIREWALL") refuse("a delta does not write KUBE-FIREWALL")
                if ($0 != ":" c " - [0:0]") refuse("not a line \":CHAIN - [0:0]\": " $0)
                if ((pass, t, c) in declared) refuse("chain " c " is declared twice")
                declared[pass, t, c] = 1
            } else if (/^-I /) {
                if (!(("ipvs", t, $0) in JUMP_OF)) refuse("not a jump rule of kube-proxy in table " t ": " $0)
                if (!((pass, t, $NF) in declared)) refuse("jump to " $NF ", which this file does not declare")
                if ((pass, t, $0) in jumped) refuse("a jump rule twice: " $0)
                jumped[pass, t, $0] = 1
            } else if (/^\*(filter|nat)$/) {
                if (t != "") refuse("table " t " has no COMMIT")
                t = substr($0, 2); chain = ""; opened = pass
                if ((pass, t) in table) refuse("table " t " appears twice")
                table[pass, t] = 1
            } else if (/^\*/) refuse("table " substr($0, 2) " is not ours")
            else if ($0 != "COMMIT" || t == "") refuse("not a line of a restore file: " $0)
            else t = ""
            next
        }
        pass == "ipvs.rules" {
            if ($2 " " $3 != server) {
                server = $2 " " $3
                if ($2 != "-t" && $2 != "-u" && $2 != "--sctp-service") refuse("not a protocol of a virtual server: " $0)
                if ($3 ~ /^[0-9.]+:[0-9]+$/) real = "^[0-9.]+:[0-9]+$"
                else if ($3 ~ /^\[[0-9a-f:.]+\]:[0-9]+$/) real = "^\\[[0-9a-f:.]+\\]:[0-9]+$"
                else refuse("not the address of a virtual server: " $0)
                if ($1 == "-a" && !DELTA) refuse("a real server that does not follow its virtual server: " $0)
                if ($1 == "-A" && server in made) refuse("virtual server " server " twice")
                made[server] = 1
            } else if ($1 == "-A") refuse("virtual server " server " twice")
            if ($1 == "-a") { if (NF != 8 || $4 != "-r" || $6 " " $7 " " $8 != "-m -w 1" || $5 !~ real) refuse("not how a real server is added: " $0) }
            else if ($1 == "-A" || DELTA && $1 == "-E") { if ($0 !~ /^-[AE] [^ ]+ [^ ]+ -s [a-z]+( -p [0-9]+)?( -b mh-port)?$/) refuse("not how a virtual server is made: " $0) }
            else if (DELTA && $1 == "-d") { if (NF != 5 || $4 != "-r" || $5 !~ real) refuse("not how a real server is deleted: " $0) }
            else if (!DELTA || $1 != "-D" || NF != 3) refuse("not a line of ipvs.rules: " $0)
            next
        }
        pass == "ipset.rules" && ($1 == "add" || DELTA && $1 == "del") {
            if ($2 != set) {
                set = $2
                if (!(set in TYPE)) refuse("set " set " is not ours")
                if (!DELTA && !(set in created)) refuse("set " set " is not created in this file")
                shape = SHAPE[TYPE[set], INET[set]]
            }
            if (NF != 3 || $3 !~ shape) refuse("not an entry of a set of type " TYPE[set] ": " $0)
            if (set ~ /HEALTH-CHECK/ && ($3 < LOW || $3 > HIGH)) refuse("health check port " $3 " is not one of " LOW "-" HIGH)
            next
        }
        pass == "ipset.rules" && ($1 == "create" || DELTA && $1 == "destroy") {
            if (!($2 in TYPE)) refuse("set " $2 " is not ours")
            if ($2 in created) refuse("set " $2 " is created twice")
            created[$2] = 1
            if ($1 == "destroy") { if (NF != 2) refuse("not a line of ipset.rules: " $0) }
            else if (TYPE[$2] == "bitmap:port") { if ($0 != "create " $2 " bitmap:port range 0-65535") refuse("not how set " $2 " is created: " $0) }
            else if ($9 !~ /^[0-9]+$/ || $0 != "create " $2 " " TYPE[$2] " family " INET[$2] " hashsize 1024 maxelem " $9) refuse("not how set " $2 " is created: " $0)
            next
        }
        pass == "ip.batch" {
            if (!DELTA && FNR == 1 && $0 == "link add kube-ipvs0 type dummy") next
            if ($0 !~ /^addr (add|del) ([0-9.]+\/32|[0-9a-f:.]+\/128) dev kube-ipvs0$/ || $2 == "del" && !DELTA) refuse("not an address for kube-ipvs0: " $0)
            next
        }
        pass == "ipvs.conf" && (/^timeouts [0-9]+ [0-9]+ [0-9]+$/ || /^exclude [0-9a-f:.]+\/[0-9]+$/) { next }
        { refuse("not a line of " pass ": " $0) }
        END { if (t != "") refuse("table " t " has no COMMIT") }' "$@") || die 2 "the files of ipvs mode cannot be checked"
    [ -z "$why" ] || die 2 "$why"
}

# ---------------------------------------------------------------- ipvs: host

ipvs_loaded() { [ -e /proc/net/ip_vs ]; }
ipsets_loaded() { [ -d /sys/module/ip_set ]; }
ipvs_device() { [ -e /sys/class/net/kube-ipvs0 ]; }

# Is anything of this mode in the kernel? A look that costs nothing where the mode was never used.
ipvs_present() {
    if ipvs_device; then return 0; fi
    ipsets_loaded && has ipset && ipset list -n 2>/dev/null | grep -q -E '^KUBE-(6-)?(CLUSTER-IP|IPVS-IPS|LOOP-BACK)$'
}

# The kernel's sets, virtual servers, addresses and timeouts as lines, into the directory $1. Nothing is loaded by looking.
ipvs_save() {
    [ -d "$1" ] || mkdir "$1"
    : >"$1/sets"; : >"$1/servers"; : >"$1/addresses"; : >"$1/timeouts"
    if ipsets_loaded && has ipset; then ipset save >"$1/sets" 2>"$work/err" || return 1; fi
    if ipvs_loaded && has ipvsadm; then
        ipvsadm -Sn >"$1/servers" 2>"$work/err" || return 1
        [ ! -s "$bundle/ipvs.conf" ] || ipvsadm -L --timeout >"$1/timeouts" 2>"$work/err" || return 1
    fi
    if ipvs_device; then
        ip -o addr show dev kube-ipvs0 >"$1/addresses" 2>"$work/err" || return 1
        echo "link" >>"$1/addresses"
    fi
}

# Modules that the bundle needs.
ipvs_modules() {
    printf '%s\n' ip_vs nf_conntrack dummy ip_set ip_set_hash_ip ip_set_hash_ipport ip_set_hash_ipportip ip_set_hash_ipportnet ip_set_bitmap_port xt_set xt_addrtype xt_comment xt_conntrack xt_mark
    set -- "$bundle/ipvs.rules"
    for name in iptables.rules ip6tables.rules; do [ ! -e "$bundle/$name" ] || set -- "$@" "$bundle/$name"; done
    awk '$1 == "-a" { next }
         $2 == "-t" || $2 == "-u" || $2 == "--sctp-service" { if ($1 == "-A" && !($5 in seen)) { seen[$5] = 1; print "ip_vs_" $5 } next }
         / -m physdev / && !physdev++ { print "xt_physdev" }
         / -m ipvs / && !ipvs++ { print "xt_ipvs" }' "$@"
}

# Load them, or with "try" only see whether they could be; ends with 3, naming the one that is missing.
ipvs_modules_load() {
    has modprobe || return 0
    dry=
    [ "$1" != try ] || dry=-n
    set --
    ipvs_modules >"$work/modules" || die 3 "ipvs.rules cannot be read (is ${TMPDIR:-/tmp} full?)"
    while read -r name; do [ -d "/sys/module/$name" ] || set -- "$@" "$name"; done <"$work/modules"
    if [ $# -eq 0 ] || modprobe -q $dry -a "$@" 2>/dev/null; then return 0; fi
    for name; do
        modprobe -q $dry "$name" 2>/dev/null || die 3 "missing kernel feature: module $name, which ipvs mode needs (it comes with the kernel's packages)"
    done
}

# ---------------------------------------------------------------- ipvs: plan
# A plan is a directory, its parts in the order in which they are carried out. First what comes, so that nothing that
# stays is ever missing, then the iptables rules, then what goes:
#   sets.add, servers.add, addresses.add        input of ipset restore, ipvsadm -R, ip -batch
#   addresses.del, servers.del, sets.del, sets.destroy
#   leaving   real servers of virtual servers that stay, "option server real": deleted once they are idle
#   timeouts  values for ipvsadm --set
#   counts    sets, virtual servers, real servers, addresses: added, changed, removed
#   detail    every difference, as in the plan of a family

# Compare what ipvs_save left in $1 with the files $2 (ipset.rules), $3 (ipvs.rules), $4 (ip.batch) and $5 (ipvs.conf),
# and write the plan into $6. The files after that name virtual servers that are ours.
# A set is changed in place, entries that come before those that go. Only a set that was made otherwise than the bundle
# makes it, or loses more entries than it keeps, is built anew and swapped in.
ipvs_plan() {
    actual=$1 sets=$2 servers=$3 addresses=$4 conf=$5 out=$6
    shift 6
    [ ! -e "$out" ] || rm -rf "$out"
    mkdir "$out"
    if [ ! -s "$actual/sets" ] && [ ! -s "$actual/servers" ] && [ ! -s "$actual/addresses" ] && [ ! -s "$conf" ]; then
        ipvs_plan_all
        return
    fi
    awk -v out="$out" "$AWK_IPVS"'
    function tell(kind, table, name, rule) { print kind "\t" table "\t" name "\t\t" rule > (out "/detail") }
    function header(   i, text) {
        text = $3
        for (i = 4; i <= NF; i++) {
            if ($i == "hashsize" || $i == "bucketsize" || $i == "initval") i++
            else text = text " " $i
        }
        return text
    }
    function address_of(server) { sub(/:[0-9]+$/, "", server); gsub(/[][]/, "", server); return server }
    # Is an address inside a CIDR? Both as lists of numbers, 8 or 16 bits each.
    function groups(ip, g,   n, i, half, left, right, a, b) {
        if (ip !~ /:/) return split(ip, g, ".")
        half = index(ip, "::")
        left = half ? substr(ip, 1, half - 1) : ip
        right = half ? substr(ip, half + 2) : ""
        n = split(left, a, ":"); i = split(right, b, ":")
        for (k = 1; k <= 8; k++) g[k] = k <= n ? hex(a[k]) : (k > 8 - i ? hex(b[k - 8 + i]) : 0)
        return 8
    }
    function hex(text,   i, n) { for (i = 1; i <= length(text); i++) n = n * 16 + index("0123456789abcdef", substr(text, i, 1)) - 1; return n + 0 }
    function inside(ip, cidr,   part, n, m, i, bits, width, size) {
        split(cidr, part, "/")
        n = groups(ip, G1); m = groups(part[1], G2)
        if (n != m) return 0
        width = n == 4 ? 8 : 16
        bits = part[2]
        for (i = 1; i <= n && bits > 0; i++) {
            size = 2 ^ (bits < width ? width - bits : 0)
            if (int(G1[i] / size) != int(G2[i] / size)) return 0
            bits -= width
        }
        return 1
    }
    function excluded(server,   i) {
        for (i = 1; i <= nx; i++) if (inside(address_of(server), exclude[i])) return 1
        return 0
    }
    # A virtual server is ours if something of ours names it: a bundle, kube-ipvs0, or a set.
    function owned(key,   part, proto, ip, port) {
        if (key in named) return 1
        split(key, part, " ")
        proto = part[1] == "-t" ? "tcp" : part[1] == "-u" ? "udp" : "sctp"
        ip = address_of(part[2])
        port = part[2]
        sub(/.*:/, "", port)
        return ip in bound || (ip "," proto ":" port) in inset || (proto ":" port) in inset
    }

    # ---- what the kernel has
    pass == "sets" && $1 == "add" {
        if (!($2 in TYPE)) next
        entry[$2, $3] = 1
        entries[$2]++
        if (TYPE[$2] == "hash:ip,port") inset[$3] = 1
        else if ($2 ~ /NODE-PORT-TCP$/) inset["tcp:" $3] = 1
        else if ($2 ~ /NODE-PORT-UDP$/) inset["udp:" $3] = 1
        next
    }
    pass == "sets" && $1 == "create" {
        if ($2 ~ /^KUBE-AKP-[0-9]+$/) print "destroy " $2 > (out "/sets.add")
        if ($2 in TYPE) have[$2] = header()
        next
    }
    pass == "servers" && $1 == "-a" && $4 == "-r" { real[$2 " " $3, $5] = substr($0, index($0, " -r ") + 5 + length($5)); next }
    pass == "servers" && $1 == "-A" && ($2 == "-t" || $2 == "-u" || $2 == "--sctp-service") {
        virtual[$2 " " $3] = substr($0, length($2) + length($3) + 6)
        next
    }
    pass == "addresses" && $1 == "link" { device = 1; next }
    pass == "addresses" && ($3 == "inet" || $3 == "inet6") && $4 !~ /^fe[89ab].:/ {
        on_device[$4] = 1
        sub(/\/.*/, "", $4)
        bound[$4] = 1
        next
    }
    pass == "timeouts" { if (match($0, /[0-9]+ [0-9]+ [0-9]+$/)) now = substr($0, RSTART); next }
    pass == "named" { if ($1 == "-A") named[$2 " " $3] = 1; next }
    pass == "conf" && $1 == "exclude" { exclude[++nx] = $2; next }
    pass == "conf" && $1 == "timeouts" {
        split(now, is, " ")
        for (i = 1; i <= 3; i++) if ($(i + 1) > 0 && $(i + 1) != is[i]) differs = 1
        if (differs) { print $2, $3, $4 > (out "/timeouts"); tell("timeouts", "ipvs", "", $2 " " $3 " " $4) }
        next
    }

    # ---- what the bundle wants
    pass == "ipset.rules" && $1 == "create" {
        set = $2
        wanted[set] = header()
        if (!(set in have)) {
            print > (out "/sets.add")
            tell("missing-set", "ipset", set, "")
            new_sets++
        } else if (have[set] != wanted[set]) {
            rebuilt[set] = $0
            tell("changed-set", "ipset", set, have[set])
            changed_sets++
        }
        order[++ns] = set
        next
    }
    pass == "ipset.rules" && $1 == "add" {
        keep[set]++
        if ((set, $3) in entry) { delete entry[set, $3]; entries[set]--; next }
        new_entries++
        if (set in have) tell("missing-entry", "ipset", set, $3)
        if (!(set in rebuilt)) print > (out "/sets.add")
        next
    }
    pass == "ipvs.rules" && $1 == "-A" {
        server = $2 " " $3
        rest = substr($0, length(server) + 5)
        mine[server] = 1
        known = server in virtual
        if (!known) { new_servers++; print > (out "/servers.add"); tell("missing-server", "ipvs", server, rest) }
        else if (virtual[server] != rest) {
            changed_servers++
            print "-E " substr($0, 4) > (out "/servers.add")
            tell("changed-server", "ipvs", server, virtual[server])
        }
        next
    }
    pass == "ipvs.rules" && $1 == "-a" {
        if (!((server, $5) in real)) {
            new_reals++
            print > (out "/servers.add")
            if (known) tell("missing-endpoint", "ipvs", server, $5)
        } else {
            rest = substr($0, index($0, " -r ") + 5 + length($5))
            if (real[server, $5] != rest) {
                changed_reals++
                print "-e " substr($0, 4) > (out "/servers.add")
                tell("changed-endpoint", "ipvs", server, $5 " " real[server, $5])
            }
            delete real[server, $5]
        }
        next
    }
    pass == "ip.batch" && $1 == "link" {
        if (!device) { print > (out "/addresses.add"); tell("missing-device", "address", "kube-ipvs0", "") }
        next
    }
    pass == "ip.batch" {
        if ($3 in on_device) delete on_device[$3]
        else { new_addresses++; print > (out "/addresses.add"); if (device) tell("missing-address", "address", "kube-ipvs0", $3) }
    }

    END {
        # Sets: entries that go, sets that are built anew, sets that nobody wants.
        for (key in entry) {
            split(key, part, SUBSEP)
            old_entries++
            if (part[1] in wanted) tell("extra-entry", "ipset", part[1], part[2])
            if (!(part[1] in wanted)) continue
            if (part[1] in rebuilt) print "add " part[1] " " part[2] > (out "/sets.old")
            if (entries[part[1]] > 100 && entries[part[1]] > keep[part[1]]) swapped[part[1]] = 1
            else print "del " part[1] " " part[2] > (out "/sets.del")
        }
        for (i = 1; i <= ns; i++) {
            if (order[i] in rebuilt) print order[i] > (out "/rebuild")
            if (order[i] in swapped) print order[i] > (out "/swap")
        }
        for (set in have) if (!(set in wanted)) {
            old_sets++
            print "destroy " set > (out "/sets.destroy")
            tell("extra-set", "ipset", set, "")
        }
        # Virtual servers that nobody wants, and real servers that leave one that stays.
        for (key in virtual) if (!(key in mine)) {
            if (!owned(key) || excluded(substr(key, index(key, " ") + 1))) continue
            old_servers++
            print "-D " key > (out "/servers.del")
            tell("extra-server", "ipvs", key, "")
        }
        for (key in real) {
            split(key, part, SUBSEP)
            if (!(part[1] in mine)) continue
            # What has weight 0 was told to leave before.
            told = real[key] ~ /-w 0$/
            if (!told) { old_reals++; tell("extra-endpoint", "ipvs", part[1], part[2]) }
            print part[1] " " part[2] " " told > (out "/leaving")
        }
        for (ip in on_device) {
            old_addresses++
            print "addr del " ip " dev kube-ipvs0" > (out "/addresses.del")
            tell("extra-address", "address", "kube-ipvs0", ip)
        }
        printf "%d %d %d %d %d ", new_sets, changed_sets, old_sets, new_entries, old_entries > (out "/counts")
        printf "%d %d %d %d %d %d ", new_servers, changed_servers, old_servers, new_reals, changed_reals, old_reals > (out "/counts")
        printf "%d %d\n", new_addresses, old_addresses > (out "/counts")
        printf "" > (out "/detail")
    }' pass=sets "$actual/sets" pass=servers "$actual/servers" pass=addresses "$actual/addresses" pass=timeouts "$actual/timeouts" \
        pass=named "$@" pass=conf "$conf" pass=ipset.rules "$sets" pass=ipvs.rules "$servers" pass=ip.batch "$addresses" || return 1
    [ ! -e "$out/rebuild" ] || ipvs_build "$out/rebuild" "$out/sets.old" "$sets" >>"$out/sets.add" || return 1
    [ ! -e "$out/swap" ] || ipvs_build "$out/swap" /dev/null "$sets" >>"$out/sets.del" || return 1
    room
}

# The plan where the kernel has nothing: the files as they are, which $out/all names.
ipvs_plan_all() {
    : >"$out/detail"
    awk '
        $1 == "create" { made++ } $1 == "add" { entries++ } $1 == "-A" { servers++ } $1 == "-a" { reals++ } $1 == "addr" { addresses++ }
        END { printf "%d 0 0 %d 0 %d 0 0 %d 0 0 %d 0 %d\n", made, entries, servers, reals, addresses, NR }' "$sets" "$servers" "$addresses" >"$out/counts" || return 1
    read -r a b c d e f g h i j k l m lines <"$out/counts"
    [ "$lines" -gt 0 ] || return 0
    printf '%s\n' "$sets" "$servers" "$addresses" >"$out/all"
    printf 'missing-state\tipvs\tkube-ipvs0\t\t%s lines\n' "$lines" >"$out/detail"
}

# Lines that build the sets named in $1 aside, with the entries in $2 and in $3, and swap them in.
ipvs_build() {
    [ -e "$2" ] || : >"$2"
    awk '
        pass == 1 { name[$1] = "KUBE-AKP-" ++n; next }
        !($2 in name) { next }
        $1 == "create" { set = $2; $2 = name[set]; print; made[++m] = set; next }
        pass == 3 && $1 == "add" { $2 = name[$2]; print; next }
        pass == 2 { old[++k] = $0 }
        END {
            for (i = 1; i <= k; i++) { $0 = old[i]; $2 = name[$2]; print }
            for (i = 1; i <= m; i++) print "swap " made[i] " " name[made[i]] "\ndestroy " name[made[i]]
        }' pass=1 "$1" pass=2 "$2" pass=3 "$3"
}

# ---------------------------------------------------------------- ipvs: commit

# Carry out the plan in $1. On failure $work/refused has the reason.
ipvs_add() {
    sets=$1/sets.add servers=$1/servers.add addresses=$1/addresses.add
    if [ -e "$1/all" ]; then { read -r sets; read -r servers; read -r addresses; } <"$1/all"; fi
    ipvs_tool "$sets" ipset restore -exist || return 1
    ipvs_tool "$servers" ipvsadm -R || return 1
    ipvs_tool "$addresses" ip -batch - || return 1
    if [ -s "$1/timeouts" ]; then
        if [ ! -e "$STATE/before/timeouts" ]; then
            old=$(ipvsadm -L --timeout 2>/dev/null) || :
            printf '%s\n' "${old##*: }" >"$STATE/before/timeouts"
        fi
        read -r a b c <"$1/timeouts"
        ipvsadm --set "$a" "$b" "$c" 2>"$work/err" || { ipvs_refused "ipvsadm --set $a $b $c"; return 1; }
    fi
}
ipvs_del() {
    ipvs_tool "$1/addresses.del" ip -force -batch - || return 1
    ipvs_tool "$1/servers.del" ipvsadm -R || return 1
    ipvs_tool "$1/sets.del" ipset restore -exist || return 1
}
# Sets that no rule of ours asks any more; one that another's rule asks stays.
ipvs_destroy() {
    if ipvs_tool "$1/sets.destroy" ipset restore -exist; then return 0; fi
    while read -r _ set; do
        if ipset destroy "$set" 2>"$work/err" || grep -q 'does not exist' "$work/err"; then continue; fi
        if ! grep -q 'in use' "$work/err"; then ipvs_refused "ipset destroy $set"; return 1; fi
        warn "set $set stays: it is in use by a rule that is not ours"
    done <"$1/sets.destroy"
}

# Feed a file, if it has lines, to a tool. ipvsadm goes on after a line that fails and then forgets about it, so
# whatever a tool says counts as a failure.
ipvs_tool() {
    [ -s "$1" ] || return 0
    file=$1
    shift
    "$@" <"$file" >/dev/null 2>"$work/err" && [ ! -s "$work/err" ] && return 0
    ipvs_refused "$*"
    return 1
}
ipvs_refused() { { printf '%s: ' "$1"; head -n 3 "$work/err" | tr '\n' ' '; } >"$work/refused"; }

# Real servers that leave: they get no new connections, and one without any is deleted, as is any but TCP. Another is
# looked at again by the next run. $1 is a file of lines "option server real told", 1 if it was told before; the
# commands go to $2. Told first and looked at then, because a connection that came in between would be cut.
ipvs_let_go() {
    [ ! -e "$STATE/draining" ] || mv "$STATE/draining" "$work/draining"
    [ -s "$1" ] || return 0
    looks='' n=0
    while read -r option server real told; do
        [ "$option" = -t ] || continue
        [ "$told" = 1 ] || printf '%s\n' "-e $option $server -r $real -m -w 0"
        case "$looks " in *" $server "*) continue ;; esac
        n=$((n + 1))
        [ "$n" -gt 4 ] || looks="$looks $server"
    done <"$1" >"$work/told"
    # What is gone already cannot be told anything, and need not; whether the others were, the look tells.
    [ ! -s "$work/told" ] || ipvsadm -R <"$work/told" >/dev/null 2>&1 || :
    # One look at each virtual server concerned, or at all of them: if they are many, or one cannot be looked at.
    if [ "$n" -le 4 ]; then for server in $looks; do ipvsadm -Ln -t "$server" 2>/dev/null || n=all; done >"$work/look"; fi
    case $n in
        [0-4]) ;;
        *) ipvsadm -Ln >"$work/look" 2>"$work/err" || { ipvs_refused "ipvsadm -Ln"; return 1; } ;;
    esac
    : >"$work/refused"
    awk -v draining="$STATE/draining" -v refused="$work/refused" '
        pass == 1 {
            if ($1 == "TCP") server = $2
            else if ($1 == "->") { weight["-t", server, $2] = $4; busy["-t", server, $2] = $NF + $(NF - 1) }
            next
        }
        $1 != "-t" { print "-d " $1 " " $2 " -r " $3; next }
        !(($1, $2, $3) in weight) { next }
        weight[$1, $2, $3] > 0 { print "ipvsadm -R: real server " $3 " of " $2 " still gets connections" > refused; exit 1 }
        busy[$1, $2, $3] { print $1 " " $2 " " $3 " 1" > draining; next }
        { print "-d " $1 " " $2 " -r " $3 }' pass=1 "$work/look" pass=2 "$1" >>"$2" && return 0
    [ -s "$work/refused" ] || echo "the real servers that leave cannot be told apart (is $STATE full?)" >"$work/refused"
    return 1
}

# Put sets, virtual servers and addresses back to what they were in the directory $1. Rules that changed as well go
# back in the middle, by the command $2: they need what comes, and what goes they may still use.
ipvs_undo() {
    cp "$work/refused" "$work/ipvs.refused"
    named=$bundle/ipvs.rules
    [ -e "$named" ] || named=/dev/null
    if ipvs_save "$work/now" && ipvs_addresses_as_batch "$1/addresses" >"$work/old.batch" &&
        sed 's/ bucketsize [0-9]*//;s/ initval [0-9a-fx]*//' "$1/sets" >"$work/old.sets" &&
        sed -n 's/^.*: \([0-9]* [0-9]* [0-9]*\)$/timeouts \1/p' "$1/timeouts" >"$work/old.conf" &&
        ipvs_plan "$work/now" "$work/old.sets" "$1/servers" "$work/old.batch" "$work/old.conf" "$work/undo" "$named" &&
        ipvs_add "$work/undo"
    then
        [ $# -eq 1 ] || "$2"
        [ -s "$1/addresses" ] || ! ipvs_device || ip link del kube-ipvs0 2>/dev/null || left_unfinished "the device kube-ipvs0 could not be removed again"
        [ ! -s "$work/undo/leaving" ] || awk '{ print "-d", $1, $2, "-r", $3 }' "$work/undo/leaving" >>"$work/undo/servers.del"
        ipvs_device || rm -f "$work/undo/addresses.del"
        { ipvs_del "$work/undo" && ipvs_destroy "$work/undo"; } ||
            left_unfinished "sets or virtual servers could not be put back: $(cat "$work/refused")"
    else
        left_unfinished "sets or virtual servers could not be put back"
    fi
    mv "$work/ipvs.refused" "$work/refused"
    # Nobody leaves after all, but those that already did.
    [ ! -e "$work/let-go" ] || rm -f "$STATE/draining"
    [ ! -e "$work/draining" ] || mv "$work/draining" "$STATE/draining"
}

ipvs_addresses_as_batch() {
    awk '$1 == "link" { print "link add kube-ipvs0 type dummy" } $3 == "inet" || $3 == "inet6" { if ($4 !~ /^fe[89ab].:/) print "addr add " $4 " dev kube-ipvs0" }' "$1"
}

# ---------------------------------------------------------------- ipvs: mode

ipvs_read() {
    iptables_read
    ipvs_save "$work/ipvs" || die 4 "the kernel cannot be read: $(cat "$work/err")"
}

ipvs_preflight() {
    need ipvsadm ipvsadm
    need ipset ipset
    need ip iproute2
    iptables_preflight
    if [ "$verb" = check ]; then ipvs_modules_load try; else ipvs_modules_load now; fi
    if ipvs_device && ! ip link show dev kube-ipvs0 type dummy 2>/dev/null | grep -q kube-ipvs0; then
        die 3 "kube-ipvs0 exists and is no dummy device; remove it (ip link del kube-ipvs0)"
    fi
}

ipvs_compare() {
    iptables_compare
    recorded_bundle
    [ -n "$recorded" ] && [ -e "$recorded/ipvs.rules" ] || recorded=$bundle
    conf=$bundle/ipvs.conf
    [ -e "$conf" ] || conf=/dev/null
    ipvs_plan "$work/ipvs" "$bundle/ipset.rules" "$bundle/ipvs.rules" "$bundle/ip.batch" "$conf" "$work/plan.ipvs" "$bundle/ipvs.rules" "$recorded/ipvs.rules" ||
        die 3 "the comparison of sets and virtual servers failed (is ${TMPDIR:-/tmp} full?)"
}

ipvs_pending() {
    if iptables_pending; then return 0; fi
    for part in all sets.add servers.add addresses.add addresses.del servers.del sets.del sets.destroy timeouts; do
        if [ -s "$work/plan.ipvs/$part" ]; then return 0; fi
    done
    # What was told to leave and is not idle yet is nothing to do.
    [ -s "$work/plan.ipvs/leaving" ] && grep -q ' 0$' "$work/plan.ipvs/leaving"
}

# First all that comes, then the rules, then all that goes.
ipvs_commit() {
    trap '' HUP INT TERM
    ipvs_add "$work/plan.ipvs" || { ipvs_undo "$work/ipvs"; return 1; }
    iptables_carry_out || { ipvs_undo "$work/ipvs"; return 1; }
    : >"$work/let-go"
    if ipvs_let_go "$work/plan.ipvs/leaving" "$work/plan.ipvs/servers.del" && ipvs_del "$work/plan.ipvs"; then
        ipvs_destroy "$work/plan.ipvs" || left_unfinished "sets that should go are still there: $(cat "$work/refused")"
        return 0
    fi
    ipvs_undo "$work/ipvs" iptables_undo
    return 1
}

# Delete what was told to leave and has become idle: what this run found, or else what the last one noted.
ipvs_drain() {
    [ ! -e "$work/let-go" ] || return 0
    if [ -e "$work/plan.ipvs/leaving" ]; then cp "$work/plan.ipvs/leaving" "$work/leaving"
    elif [ -s "$STATE/draining" ]; then cp "$STATE/draining" "$work/leaving"
    else return 0
    fi
    as_before=false
    if ipvs_let_go "$work/leaving" "$work/let-go" && ipvs_tool "$work/let-go" ipvsadm -R; then return 0; fi
    warn "a real server that should go is still there, the next run will look again: $(cat "$work/refused")"
    sed 's/1$/0/' "$work/leaving" >"$STATE/draining"
}

# How many real servers wait for their connections to end, in $draining.
ipvs_draining() {
    draining=0
    [ ! -s "$STATE/draining" ] || while read -r _; do draining=$((draining + 1)); done <"$STATE/draining"
}

ipvs_counts() { iptables_counts; }

# The plan beyond chains, for the answer.
ipvs_report() {
    read -r a b c d e f g h i j k l m _ <"$work/plan.ipvs/counts"
    printf '"sets": {"added": %d, "changed": %d, "removed": %d, "entriesAdded": %d, "entriesRemoved": %d}, ' "$a" "$b" "$c" "$d" "$e"
    printf '"servers": {"added": %d, "changed": %d, "removed": %d, "endpointsAdded": %d, "endpointsChanged": %d, "endpointsRemoved": %d}, ' "$f" "$g" "$h" "$i" "$j" "$k"
    ipvs_draining
    printf '"addresses": {"added": %d, "removed": %d}, "draining": %d, ' "$l" "$m" "$draining"
}

ipvs_details() {
    iptables_details
    [ -s "$work/plan.ipvs/detail" ] || return 0
    listed=$bundle/services.jsonl
    [ -e "$listed" ] || listed=/dev/null
    awk -F '\t' "$AWK_QUOTE"'
    # Which Service has this frontend, "proto ip:port", this node port, or else this address?
    function service_of(proto, at,   ip, port) {
        if ((proto " " at) in front) return front[proto " " at]
        ip = port = at
        sub(/.*:/, "", port)
        sub(/:[0-9]+$/, "", ip)
        if ((proto " " port) in front) return front[proto " " port]
        return address(ip)
    }
    function address(ip) { gsub(/[][]/, "", ip); return ip in at_ip ? at_ip[ip] : "" }
    function entry_of(entry,   part, n) {
        n = split(entry, part, ",")
        if (n < 2) return n == 1 ? address(entry) : ""
        if (split(part[2], port, ":") < 2) return address(part[1])
        return service_of(port[1], (part[1] ~ /:/ ? "[" part[1] "]" : part[1]) ":" port[2])
    }
    function who(   word) {
        if ($2 == "ipset" && $5 ~ /^[0-9]+$/) return service_of($3 ~ /UDP/ ? "udp" : "tcp", $5)
        if ($2 == "ipset") return entry_of($5)
        if ($2 == "address") { ip = $5; sub(/\/.*/, "", ip); return address(ip) }
        if (split($3, word, " ") < 2) return ""
        return service_of(word[1] == "-t" ? "tcp" : word[1] == "-u" ? "udp" : "sctp", word[2])
    }
    FILENAME == ARGV[1] {
        n = split($0, word, "\"")
        for (i = 2; i < n; i += 2) {
            value = word[i]
            if (word[i + 1] ~ /^:/) {
                key = value
                if (key == "nodePort") { split(word[i + 1], number, /[^0-9]+/); front[proto " " number[2]] = name }
            } else if (key == "service") name = value
            else if (key == "port") name = name ":" value
            else if (key == "protocol") proto = value
            else if (key == "clusterIP" || key ~ /ndpoints$/) {
                if (key == "clusterIP") { common = value; sub(/.*:/, "", common) }
                if (!((proto " " value) in front)) front[proto " " value] = name
                sub(/:[0-9]+$/, "", value)
                gsub(/[][]/, "", value)
                if (!(value in at_ip)) at_ip[value] = name
            } else if (key ~ /IPs$/) {
                front[proto " " (value ~ /:/ ? "[" value "]" : value) ":" common] = name
                if (!(value in at_ip)) at_ip[value] = name
            }
        }
        next
    }
    {
        printf ", {\"kind\": \"%s\", \"table\": \"%s\", \"name\": %s", $1, $2, quote($3)
        if ((service = who()) != "") printf ", \"service\": %s", quote(service)
        if ($5 != "") printf ", \"value\": %s", quote($5)
        printf "}"
    }' "$listed" "$work/plan.ipvs/detail"
}

# Markers and jumps, the device, all sets, and as many virtual servers as there should be.
ipvs_current() {
    ipvs_device && ipvs_loaded && iptables_current || return 1
    ipset list -n 2>/dev/null | awk '
        pass == "ipset.rules" { if ($1 == "create") want[$2] = 1; next }
        pass == "ipvs.rules" { if ($1 == "-A") n++; next }
        pass == "ip_vs" { if (/^(TCP|UDP|SCTP) /) servers++; next }
        { delete want[$1] }
        END { for (set in want) exit 1; exit servers + 0 < n + 0 }' \
        pass=ipset.rules "$bundle/ipset.rules" pass=ipvs.rules "$bundle/ipvs.rules" pass=ip_vs /proc/net/ip_vs pass=names -
}

ipvs_expected() { iptables_expected; }
ipvs_markers() { iptables_markers; }

ipvs_remember() {
    if [ ! -e "$STATE/before/iptables" ]; then
        iptables_remember "$1"
        : >"$1/iptables"
    fi
}

# Remove device, virtual servers and sets; the chains that ask them are gone already.
ipvs_remove() {
    if foreign_noted ipvs/sets; then
        : >"$work/refused"
        ipvs_undo "$STATE/foreign/ipvs"
        [ -z "$unfinished" ]
        return
    fi
    ipvs_save "$work/leave-ipvs" || return 1
    recorded_bundle
    : >"$work/left.conf"
    : >"$work/left.servers"
    if [ -n "$recorded" ] && [ -e "$recorded/ipvs.rules" ]; then
        grep '^exclude' "$recorded/ipvs.conf" >"$work/left.conf" || :
        cp "$recorded/ipvs.rules" "$work/left.servers"
    fi
    ipvs_plan "$work/leave-ipvs" /dev/null /dev/null /dev/null "$work/left.conf" "$work/left" "$work/left.servers" || return 1
    if ipvs_device; then ip link del kube-ipvs0 2>"$work/err" || { ipvs_refused "ip link del kube-ipvs0"; return 1; }; fi
    rm -f "$work/left/addresses.del" "$STATE/draining"
    ipvs_del "$work/left" && ipvs_destroy "$work/left" || return 1
    if ipvs_loaded && [ -s "$STATE/before/timeouts" ]; then
        read -r a b c <"$STATE/before/timeouts"
        ipvsadm --set "$a" "$b" "$c" 2>/dev/null || warn "the timeouts of ip_vs could not be set back"
    fi
}

