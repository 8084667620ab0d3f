# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- iptables: host
flavour=            # nft or legacy
flavour_trouble=    # why this host cannot be served, if so

# The command of a family in the chosen flavour, in $ipt: ipt 4 save -> iptables-nft-save. A subshell would cost a process.
ipt() {
    case $1 in 4) tool=iptables ;; 6) tool=ip6tables ;; esac
    if has "$tool-$flavour${2:+-$2}"; then tool=$tool-$flavour; fi
    ipt=$tool${2:+-$2}
}

# The flavour of the plain iptables command, in $plain.
plain_flavour() {
    case $(iptables -V 2>/dev/null) in *nf_tables*) plain=nft ;; *) plain=legacy ;; esac
}

# Is there a command for this flavour?
flavour_present() { has "iptables-$1" || { has iptables && plain_flavour && [ "$plain" = "$1" ]; }; }

# Legacy tables of a family that exist in this namespace, in $tables; $others if there are more than may be ours. Reading
# one that does not exist would create it.
legacy_tables() {
    tables='' others=
    case $1 in 4) names=/proc/net/ip_tables_names ;; 6) names=/proc/net/ip6_tables_names ;; esac
    [ -r "$names" ] || return 0
    # By the shell itself: a tool that fails would say that there are none.
    while read -r name; do
        case $name in mangle | filter | nat) tables="$tables $name" ;; *) others=1 ;; esac
    done <"$names"
}

# Print a family's tables as iptables-save does. Nothing is created by looking.
# On nft the tool reads the whole family whatever table is asked for, so it is called once.
iptables_save() {
    ipt "$1" save
    if ! has "$ipt"; then return 0
    elif [ "$flavour" = nft ]; then
        # A kernel without nf_tables and foreign tables that iptables cannot print are no failure; any other is, as
        # what could not be read would be taken for what is not there.
        "$ipt" 2>"$work/save.err" || grep -q -e 'rule set generation' -e incompatible "$work/save.err"
    else
        legacy_tables "$1"
        if [ -n "$tables" ] && [ -z "$others" ]; then
            "$ipt" 2>"$work/save.err" || return 1
        else for t in $tables; do "$ipt" -t "$t" 2>"$work/save.err" || return 1; done
        fi
    fi
}

# Whose chains an iptables-save text holds: "ours" and "kubelet", one, or nothing.
chains_of() {
    awk "$AWK_OWNED"'
        /^\*/ { t = substr($1, 2) }
        /^:KUBE-(IPTABLES-HINT|KUBELET-CANARY) / { kubelet = 1; next }
        /^:KUBE-FIREWALL / { next }
        /^:KUBE-/ { if (is_owned(t, substr($1, 2))) ours = 1 }
        END { if (ours) print "ours"; if (kubelet) print "kubelet" }' "$@"
}

# Read both flavours and choose: where kube chains live, else as recorded, else the host's default.
# Sets flavour and flavour_trouble, and leaves the text in $work/actual.FAMILY.
iptables_read() {
    in_nft='' in_legacy='' unread=''
    : >"$work/save.err"
    likely=$r_flavour
    if [ -z "$likely" ] || ! flavour_present "$likely"; then
        plain_flavour
        likely=$plain
    fi
    for flavour in nft legacy; do
        if [ "$flavour" = "$likely" ]; then text=$work/actual; else text=$work/other; fi
        for fam in $FAMILIES; do
            : >"$text.$fam"
            ! flavour_present "$flavour" || iptables_save "$fam" >"$text.$fam" || unread="$ipt failed, so what the kernel has is not known: $(tail -n 1 "$work/save.err")"
        done
        if [ ! -s "$text.4" ] && [ ! -s "$text.6" ]; then continue; fi
        case $flavour in
            nft) in_nft=$(chains_of "$text.4" "$text.6") ;;
            legacy) in_legacy=$(chains_of "$text.4" "$text.6") ;;
        esac
    done
    flavour=$likely
    case $in_nft/$in_legacy in
        */ | kubelet/kubelet) [ -z "$in_nft" ] || [ -n "$in_legacy" ] || flavour=nft ;;
        /*) flavour=legacy ;;
        *ours*/*ours*) flavour_trouble="KUBE chains live in iptables-nft and in iptables-legacy; stop what writes to one of them and clean it (kube-proxy --cleanup, or iptables-legacy by hand), then try again" ;;
        *) flavour_trouble="kube-proxy's and kubelet's chains live in different flavours of iptables; set AKP_IPTABLES to the flavour kubelet uses" ;;
    esac
    if [ -n "${AKP_IPTABLES:-}" ]; then
        flavour=$AKP_IPTABLES
        case $in_nft/$in_legacy in *ours*/*ours*) ;; *) flavour_trouble='' ;; esac
    fi
    [ -z "$unread" ] || flavour_trouble=$unread
    case $flavour in nft | legacy) ;; *) die 2 "AKP_IPTABLES is \"$flavour\", not nft or legacy" ;; esac
    [ "$flavour" = "$likely" ] || for fam in $FAMILIES; do mv "$work/other.$fam" "$work/actual.$fam"; done
}

# Can a family be programmed? Where there is a table, yes; else it is tried in a throw-away network namespace, so that
# no table appears here.
family_works() {
    ipt "$1" restore
    has "$ipt" || return 1
    if in_rules "$1" '^\*nat$'; then return 0; fi
    ipt "$1"
    if in_sandbox "$ipt" -t nat -N AKP-PROBE; then return 0; fi
    ! in_sandbox true
}

# The same where there may be no iptables: nftables mode does without.
family_usable() {
    if has iptables; then family_works "$1"
    else has nft && in_sandbox nft add table "$(if [ "$1" = 6 ]; then echo ip6; else echo ip; fi)" akp-probe
    fi
}

# Run a command in a new, empty network namespace that ends with it.
in_sandbox() { has unshare && unshare -n "$@" >/dev/null 2>&1; }

# Tables and built-in chains in the kernel, as "table" and "table chain" lines (nft back end).
iptables_inventory() {
    case $1 in 4) f=ip ;; 6) f=ip6 ;; esac
    if has nft; then
        nft list chains "$f" >"$work/chains" 2>/dev/null && awk '
            $1 == "table" { t = $3; print t }
            $1 == "chain" { c = $2 }
            $1 == "type" { print t, c }' "$work/chains"
    else
        # Without nft built-in chains cannot be told from their absence: those of a table count as there.
        awk '/^\*/ { t = substr($1, 2); print t } /^:/ && $2 != "-" { print t, substr($1, 2) }' "$work/actual.$1"
    fi
}

# ---------------------------------------------------------------- iptables: plan
# A plan is a directory of restore files and what they amount to:
#   stage    chains that nothing jumps to yet, in several transactions (nft back end only)
#   switch   one transaction per table: changed chains, jumps, marker, stale chains
#   drop     stale service chains when they are many: unreferenced after the switch (nft only)
#   counts   chains added, changed, removed, same; jump rules inserted or removed
#   detail   every difference, tab separated: kind, table, chain, service, rule
#   kept     stale chains that a foreign rule jumps to

# Compare the kernel ($1, iptables-save text) with the wanted text ($2) and write the plan into $3.
# $4 is "own" or "keep" for KUBE-FIREWALL: keep = kubelet fills it, only its existence is ours.
# Chains are compared as text: bundles are written as iptables-save prints.
iptables_plan() {
    [ ! -e "$3" ] || rm -rf "$3"
    mkdir "$3"
    awk -v out="$3" -v flavour="$flavour" -v firewall="$4" -v CHUNK="$CHUNK" "$AWK_OWNED"'
    # Service chains and KUBE-MARK-MASQ may be staged; the other static chains switch with the marker.
    function stageable(t, c) {
        return flavour == "nft" && t == "nat" && (c ~ /^KUBE-(SVC|SVL|EXT|SEP|FW)-/ || c == "KUBE-MARK-MASQ")
    }
    function stage(line) {
        if (!staging) { print "*nat" > STAGE; staging = 1 }
        print line > STAGE
        lines++
    }
    function end_of_group() {
        if (staging && lines >= CHUNK) { print "COMMIT" > STAGE; staging = 0; lines = 0 }
    }
    function put(t, part, line) { print line > (out "/" t "." part) }
    function declare(t, c) { put(t, "1-chains", ":" c " - [0:0]") }
    function tell(kind, t, c, svc, rule) { print kind "\t" t "\t" c "\t" svc "\t" rule > DETAIL }
    # The service a rule is about, where its comment tells.
    function service_of(rule) {
        if (!match(rule, /"[a-z0-9.-]+\/[a-z0-9.:-]+/)) return ""
        return substr(rule, RSTART + 1, RLENGTH - 1)
    }
    # The wanted rules of a chain are complete in W[1..wn]: write them if the kernel has others.
    function finish(   i, key, same, early) {
        if (chain == "") return
        key = table SUBSEP chain
        seen[key] = 1
        if (!(key in have)) {
            early = stageable(table, chain)
            for (i = 1; i <= wn; i++) if (early) stage(W[i]); else put(table, "2-rules", W[i])
        } else {
            same = wn == count[key]
            for (i = 1; same && i <= wn; i++) if (W[i] != K[key, i]) same = 0
            if (!same) rewrite(key)
        }
        chain = ""; wn = 0
    }
    # Declare (and so flush) a chain, write its rules, and name what was different.
    function rewrite(key,   i, n, left) {
        changed++
        declare(table, chain)
        for (i = 1; i <= wn; i++) put(table, "2-rules", W[i])
        for (i = 1; i <= count[key]; i++) left[K[key, i]]++
        for (i = 1; i <= wn; i++) {
            if (left[W[i]] > 0) { left[W[i]]--; continue }
            tell("missing-rule", table, chain, group[key] == "" ? service_of(W[i]) : group[key], W[i]); n++
        }
        for (i = 1; i <= count[key]; i++) {
            if (left[K[key, i]] <= 0) continue
            left[K[key, i]]--
            tell("extra-rule", table, chain, group[key] == "" ? service_of(K[key, i]) : group[key], K[key, i]); n++
        }
        if (!n) tell("order", table, chain, group[key], "")
    }
    # Flush and delete stale service chains, callers before callees: no transaction leaves a reference.
    function drop(prefix,   i, c) {
        for (i = 1; i <= removed; i++) {
            split(stale[i], part, SUBSEP)
            c = part[2]
            if (!stageable(part[1], c) || index(c, prefix) != 1) continue
            if (dropped++ % 500 == 0) print (dropped > 1 ? "COMMIT\n" : "") "*nat" > (out "/drop")
            print ":" c " - [0:0]\n-X " c > (out "/drop")
        }
    }
    BEGIN { STAGE = out "/stage"; DETAIL = out "/detail" }

    # ---- what the kernel has
    pass == 1 && /^-A / {
        key = table SUBSEP $2
        if (key in have) {
            if (index($0, "--nfacct-name  ")) sub(/--nfacct-name  /, "--nfacct-name ")
            K[key, ++count[key]] = $0
        } else if (match($0, / -[jg] KUBE-[A-Z0-9-]+/)) {
            if ((table, $0) in JUMP) jumps[table, $0]++
            else foreign[table, substr($0, RSTART + 4, RLENGTH - 4)] = $0
        }
        next
    }
    pass == 1 && /^:/ {
        name = substr($1, 2)
        if (is_owned(table, name)) { key = table SUBSEP name; have[key] = 1; count[key] = 0; actual[++na] = key }
        next
    }
    /^\*/ { table = substr($1, 2); service = ""; next }
    pass == 1 { next }

    # ---- what is wanted
    /^-A / {
        if ($2 != chain) { finish(); chain = $2 }
        W[++wn] = $0
        next
    }
    /^:/ {
        name = substr($1, 2)
        key = table SUBSEP name
        want[key] = 1
        wanted[++nw] = key
        group[key] = service
        if (!(key in have)) {
            added++
            tell("missing-chain", table, name, service, "")
            if (stageable(table, name)) stage($0); else declare(table, name)
        }
        next
    }
    /^#/ { finish(); service = $2; end_of_group(); next }
    /^-I / { finish(); jump_wanted[table, "-A" substr($0, 3)] = 1; jump[++nj] = table SUBSEP $0; next }
    /^COMMIT/ { finish() }

    END {
        finish()
        # Wanted without rules: empty, except where kubelet fills KUBE-FIREWALL.
        for (i = 1; i <= nw; i++) {
            key = wanted[i]
            if (!(key in have) || key in seen || count[key] == 0) continue
            split(key, part, SUBSEP)
            if (part[2] == "KUBE-FIREWALL" && firewall == "keep") continue
            table = part[1]; chain = part[2]; wn = 0
            rewrite(key)
        }
        # Jumps: each wanted one exactly once; those of ours that are not wanted go.
        for (key in jumps) {
            split(key, part, SUBSEP)
            n = jumps[key]
            if (key in jump_wanted) n--
            else if (part[2] ~ / -j KUBE-FIREWALL$/ && firewall == "keep" && !((part[1], "KUBE-FIREWALL") in want)) n = 0
            for (; n > 0; n--) {
                moved++
                put(part[1], "3-jumps", "-D" substr(part[2], 3))
                tell("extra-jump", part[1], "", "", part[2])
            }
        }
        for (i = 1; i <= nj; i++) {
            split(jump[i], part, SUBSEP)
            line = "-A" substr(part[2], 3)
            if ((part[1], line) in jumps) continue
            moved++
            put(part[1], "3-jumps", part[2])
            tell("missing-jump", part[1], "", "", line)
        }
        # Stale chains: ours, not wanted. One that a foreign rule jumps to is emptied, not removed.
        for (i = 1; i <= na; i++) {
            key = actual[i]
            if (key in want) { same++; continue }
            split(key, part, SUBSEP)
            if (part[2] == "KUBE-FIREWALL" && firewall == "keep") continue
            if (key in foreign) {
                if (count[key]) declare(part[1], part[2])
                print part[1] " " part[2] " " foreign[key] > (out "/kept")
                continue
            }
            tell("stale-chain", part[1], part[2], count[key] ? service_of(K[key, 1]) : "", "")
            stale[++removed] = key
        }
        many = flavour == "nft" && removed > 1000
        for (i = 1; i <= removed; i++) {
            split(stale[i], part, SUBSEP)
            if (many && stageable(part[1], part[2])) continue
            declare(part[1], part[2])
            put(part[1], "4-stale", "-X " part[2])
        }
        if (many) { drop("KUBE-FW-"); drop("KUBE-EXT-"); drop("KUBE-SV"); drop("KUBE-SEP-"); drop("KUBE-MARK") }
        if (dropped) print "COMMIT" > (out "/drop")
        if (staging) print "COMMIT" > STAGE
        print added + 0, changed + 0, removed + 0, same - changed, moved + 0 > (out "/counts")
        printf "" > DETAIL
    }' pass=1 "$1" pass=2 "$2" || return 1
    plan=$3
    set --
    for t in mangle filter nat; do
        for part in "$plan/$t".[1-4]-*; do [ ! -e "$part" ] || set -- "$@" "t=$t" "$part"; done
    done
    : >"$plan/switch"
    [ $# -eq 0 ] || awk '
        t != table { if (table != "") print "COMMIT"; table = t; print "*" t }
        { print }
        END { print "COMMIT" }' "$@" >"$plan/switch" || return 1
    room
}

# True when a plan has something to do.
plan_pending() { [ -s "$1/stage" ] || [ -s "$1/switch" ] || [ -s "$1/drop" ]; }

# Our part of an iptables-save text as wanted text: what undo goes back to.
iptables_owned() {
    awk "$AWK_OWNED"'
        /^\*/ { t = substr($1, 2); print }
        /^:/ && is_owned(t, substr($1, 2)) { print $1 " - [0:0]" }
        /^-A / {
            if (is_owned(t, $2)) { sub(/--nfacct-name  /, "--nfacct-name "); print }
            else if ((t, $0) in JUMP) back[++n] = "-I" substr($0, 3)
        }
        /^COMMIT/ { while (n > 0) print back[n--]; print }'
}

# KUBE-FIREWALL and the jumps to it as wanted text, if it is there, of the iptables-save text $1.
iptables_firewall() {
    iptables_owned <"$1" >"$work/owned" && awk '
        /^\*/ { inside = $0 == "*filter" }
        !inside { next }
        /^:/ { if ($1 == ":KUBE-FIREWALL") { found = 1; print "*filter\n" $0 } ; next }
        /^-A KUBE-FIREWALL / || / -j KUBE-FIREWALL$/ { if (found) print }
        END { if (found) print "COMMIT" }' "$work/owned"
}

kubelet_here() { in_rules "$1" '^:KUBE-(KUBELET-CANARY|IPTABLES-HINT) '; }

# Has the kernel, of family $1, a line like $2? A look that fails is neither yes nor no: then the run ends.
in_rules() {
    [ -s "$work/actual.$1" ] || return 1
    grep -q -E "$2" "$work/actual.$1" && return 0
    [ $? -eq 1 ] || die 4 "the rules of ipv$1 cannot be searched, nothing was changed"
    return 1
}

# Whose is KUBE-FIREWALL, in $owner: kubelet's ("keep") when kubelet is here or the chain was before us.
firewall_owner() {
    owner=keep
    if kubelet_here "$1"; then return 0; fi
    if [ -e "$STATE/before/iptables" ]; then [ -s "$STATE/before/firewall.$1" ] || owner=own
    elif ! in_rules "$1" '^:KUBE-FIREWALL '; then owner=own
    fi
}

# ---------------------------------------------------------------- iptables: commit

# Load a restore file. On failure $work/refused has the tool's message and the line it refused.
iptables_restore() {
    ipt "$1" restore
    "$ipt" -w 5 --noflush --counters <"$2" >/dev/null 2>"$work/err" && return 0
    line=$(sed -n 's/.*[Ll]ine:\{0,1\} \([0-9][0-9]*\).*/\1/p' "$work/err" | sed -n 1p)
    {
        grep -v -e '^ *$' -e '^Try ' "$work/err" | tr '\n' ' '
        [ -z "$line" ] || awk -v n="$line" '/^\*/ { t = substr($1, 2) } NR == n { printf "-- %s", /^COMMIT/ ? "COMMIT of table " t : $0; exit }' "$2"
    } >"$work/refused"
    return 1
}

# The switching restore. iptables-nft looks up every chain a transaction names in a sorted list, which
# takes minutes when there are many; a listing at the top makes it read the table once instead. Where a
# version refuses that line the plain file is loaded: a file without -I and -D can be loaded again.
iptables_switch() {
    if [ "$flavour" = nft ] && [ "$(wc -l <"$2")" -gt 4000 ] && ! grep -q '^-[ID] ' "$2"; then
        if awk '{ print } /^\*/ { print "-S" }' "$2" >"$2.listed" && iptables_restore "$1" "$2.listed"; then return 0; fi
    fi
    iptables_restore "$1" "$2"
}

# Carry out the plans $work/plan.FAMILY: all staging first, then the switch of each family. If anything
# is refused, all of ours goes back to $work/actual.FAMILY, and the reason is in $work/refused.
iptables_carry_out() {
    for fam in $FAMILIES; do
        [ ! -s "$work/plan.$fam/stage" ] || iptables_restore "$fam" "$work/plan.$fam/stage" || { iptables_undo; return 1; }
    done
    trap '' HUP INT TERM
    for fam in $FAMILIES; do
        [ ! -s "$work/plan.$fam/switch" ] || iptables_switch "$fam" "$work/plan.$fam/switch" || { iptables_undo; return 1; }
    done
    for fam in $FAMILIES; do
        [ ! -s "$work/plan.$fam/drop" ] || iptables_restore "$fam" "$work/plan.$fam/drop" || { iptables_undo; return 1; }
    done
}

# Put our chains and jumps back: the same comparison, with the old text as what is wanted.
iptables_undo() {
    trap '' HUP INT TERM
    mv "$work/refused" "$work/reason"
    for fam in $FAMILIES; do
        iptables_owned <"$work/actual.$fam" >"$work/old.$fam" || { left_unfinished "ipv$fam could not be put back"; continue; }
        iptables_save "$fam" >"$work/now.$fam" || { left_unfinished "ipv$fam could not be read to put it back"; continue; }
        iptables_plan "$work/now.$fam" "$work/old.$fam" "$work/undo.$fam" own || { left_unfinished "ipv$fam could not be put back"; continue; }
        for part in stage switch drop; do
            [ ! -s "$work/undo.$fam/$part" ] || iptables_restore "$fam" "$work/undo.$fam/$part" ||
                left_unfinished "ipv$fam could not be put back: $(cat "$work/refused")"
        done
    done
    if [ -n "$remembered" ] || [ "$r_mode" != "$mode" ]; then iptables_drop_tables; fi
    mv "$work/reason" "$work/refused"
}

# Remove tables and built-in chains that were not there before the first apply and hold nothing (nft back end). What a
# tool could not do is tried once more.
iptables_drop_tables() {
    if [ "$flavour" != nft ] || [ ! -e "$STATE/before/tables.4" ]; then return 0; fi
    for fam in $FAMILIES; do
        ipt "$fam"
        has "$ipt" || continue
        for try in 1 2 3; do
            iptables_inventory "$fam" >"$work/inventory" || continue
            awk 'pass == 1 { was[$0] = 1; next } $1 ~ /^(mangle|filter|nat)$/ && !($0 in was)' \
                pass=1 "$STATE/before/tables.$fam" pass=2 "$work/inventory" >"$work/surplus" || continue
            if [ ! -s "$work/surplus" ] || [ "$try" = 3 ]; then break; fi
            iptables_drop_surplus "$fam"
        done
    done
}

# Of what $work/surplus names, what is empty. One that cannot be read is not, and a policy is somebody's.
iptables_drop_surplus() {
    case $1 in 4) f=ip ;; 6) f=ip6 ;; esac
    tables=
    while read -r t c; do
        # Not by nft, which would delete a chain with all the rules that came to it meanwhile.
        if [ -z "$c" ]; then tables="$tables $t"
        elif [ "$("$ipt" -t "$t" -S "$c" 2>/dev/null)" = "-P $c ACCEPT" ]; then "$ipt" -t "$t" -X "$c" 2>/dev/null || :
        fi
    done <"$work/surplus"
    # An empty table is two lines; one with anything in it is not deleted.
    has nft || return 0
    for t in $tables; do
        [ "$(nft list table "$f" "$t" 2>/dev/null | wc -l)" -ne 2 ] || nft delete table "$f" "$t" 2>/dev/null || :
    done
}
