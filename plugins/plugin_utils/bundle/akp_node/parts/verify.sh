# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-verify - may this host take what came? akp-node asks it wherever allowed signers are pinned, and takes nothing without it.
#
# A bundle is applied only with a release: a text that names it (release.awk shows its lines), and signatures of that text. They lie
# beside the manifest as release, release.sig, release.1.sig, ...
#   akp-verify bundle DIR LINE    the release in DIR is good and has LINE, which names a bundle: ok COUNTER, and " automation"
#                                 if approvers are missing and automation has signed: then `endpoints` has to agree, too
#   akp-verify release DIR        the same for the bundle of this host, whichever it is: ok COUNTER GENERATION
#   akp-verify kept DIR LINE      a signer who is still allowed has signed the release in DIR, and it has LINE. DIR was verified when it
#                                 came, so counter, expiry and the number of signers are not asked again
#   akp-verify endpoints DIR KIND SNAPSHOT DELTA...    the bundle or delta in DIR changes endpoints of the recorded state only
# Exit 0 and ok: yes; 2: no, and 3: cannot be told, with the reason on stdout. It changes nothing.
set -eu
umask 077
LC_ALL=C
PATH=${AKP_PATH:+$AKP_PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}
export LC_ALL PATH
STATE=${AKP_STATE:-/var/lib/akp}
ETC=${AKP_ETC:-/etc/akp}
NL='
'
signers=' '     # " alice bob ": whose signatures are good
counter=''      # of the release: milliseconds since the epoch
automated=''    # approvers are missing, and automation has signed
refused=''      # why a step failed
told=''         # what is printed after ok
reply=''

# End with a code and the reason. Never inside $( ).
fail() {
    local code
    code=$1
    shift
    printf '%s\n' "$*"
    exit "$code"
}

# include tools/setting.sh

# reply is the Node that this host is: the one in node.conf, or the host's name in small letters.
this_node() {
    setting node
    [ -n "$reply" ] || reply=$(uname -n | tr '[:upper:]' '[:lower:]')
}

# ---------------------------------------------------------------- Signatures
# signers are those whose signatures of $1/release are good. A signer counts once, however many keys or signatures. False with
# refused if there is none.
verify_signatures() {
    local dir sig who said
    command -v ssh-keygen >/dev/null || fail 3 "missing tool: ssh-keygen (package openssh-client)"
    dir=$1 signers=' ' refused='it has no signature'
    set --
    if [ -e "$ETC/revoked_signers" ]; then set -- -r "$ETC/revoked_signers"; fi
    for sig in "$dir/release.sig" "$dir"/release.[0-9].sig "$dir"/release.[0-9][0-9].sig; do
        [ -f "$sig" ] || continue
        who=$(ssh-keygen -Y find-principals -f "$ETC/allowed_signers" -s "$sig" 2>&1) || {
            case $who in *nknown\ option* | *llegal\ option* | *nsupported\ operation* | *sage*)
                fail 3 "missing feature: ssh-keygen -Y (OpenSSH 8.2 or newer), without it releases cannot be verified" ;;
            esac
            refused="${sig##*/} is broken, or of a signer who is not in $ETC/allowed_signers"
            continue
        }
        who=${who%%"$NL"*} who=${who%%,*}
        case $who in '' | *[!A-Za-z0-9@._+=-]*)
            refused="${sig##*/}: signer \"$who\" in $ETC/allowed_signers is not a plain name"
            continue ;;
        esac
        if said=$(ssh-keygen -Y verify -f "$ETC/allowed_signers" -I "$who" -n akp-release -s "$sig" "$@" 2>&1 <"$dir/release"); then
            case $signers in *" $who "*) ;; *) signers="$signers$who " ;; esac
        else refused="${sig##*/} by $who does not fit the text, or may not count: ${said%%"$NL"*}"
        fi
    done
    [ "$signers" != ' ' ]
}

# End unless as many approvers have signed as node.conf asks for, or automation has: then automated is set.
count_signers() {
    local approvers name
    approvers=0
    for name in $signers; do [ "$name" = automation ] || approvers=$((approvers + 1)); done
    setting signatures 1
    case $reply in '' | *[!0-9]*) fail 2 "$ETC/node.conf: signatures is a number, not $reply" ;; esac
    [ "$approvers" -lt "$reply" ] || return 0
    case $signers in *' automation '*) automated=1; return 0 ;; esac
    fail 2 "the release has good signatures of $approvers signers ($signers), this node wants $reply ($ETC/node.conf: signatures)"
}

# ---------------------------------------------------------------- Release
# Verify the release in directory $1, and read it: counter. reply is not empty if the line $2 is in it. End if it is not signed by
# enough signers, malformed, of another cluster, expired or replayed.
read_release() {
    local cluster expires covered now applied
    verify_signatures "$1" || fail 2 "the release is not signed by an allowed signer: $refused"
    reply=$(awk -v wanted="$2" "$release_awk" "$1/release") || fail 3 "the release cannot be read"
    case $reply in 'bad '*) fail 2 "release: ${reply#bad }" ;; esac
    read -r cluster counter expires covered <<END
$reply
END
    setting cluster
    [ -n "$reply" ] ||
        fail 2 "$ETC/node.conf does not say which cluster this node is of; add a line: cluster NAME (the release is of cluster \"$cluster\")"
    [ "$cluster" = "$reply" ] || fail 2 "the release is of cluster \"$cluster\", this node is of cluster \"$reply\""
    now=$(date +%s) || fail 3 "missing tool: date"
    [ "$expires" -gt "$now" ] ||
        fail 2 "release expired $((now - expires)) s ago: publish or approve anew (or is the clock of this host wrong?)"
    applied=0
    [ ! -r "$STATE/counter" ] || read -r applied <"$STATE/counter" || :
    case $applied in '' | *[!0-9]* | ????????????????*) applied=0 ;; esac
    [ "$counter" -ge "$applied" ] || fail 2 "release replayed: it is older than the one applied last (counter $counter after $applied)"
    count_signers
    # A counter is a time, and nothing older counts any more: with one of next year, approvers would be locked out.
    [ -z "$automated" ] || [ $((counter / 1000)) -le $((now + 86400)) ] ||
        fail 2 "the release is signed by automation alone, and its counter $counter is more than a day ahead (or is the clock wrong?)"
    reply=$covered
}

verify_bundle() {
    local node
    [ -f "$1/release" ] ||
        fail 2 "unsigned: this node takes only what its signers released ($ETC/allowed_signers). See akp publish, or have the plan approved"
    read_release "$1" "$2"
    [ -n "$reply" ] || fail 2 "the release does not name this bundle ($2)"
    node=${2#* } node=${node%% *}
    this_node
    [ "$node" = "$reply" ] || fail 2 "the bundle is for node \"$node\", this is \"$reply\" (if not, say so in $ETC/node.conf: node NAME)"
    told="$counter${automated:+ automation}"
}

verify_release() {
    local generation
    [ -f "$1/release" ] || fail 2 "$1 has no release"
    read_release "$1" ''
    this_node
    generation=$(awk -v node="$reply" '$1 == "bundle" && $2 "" == node { print $3; exit }' "$1/release") || fail 3 "the release cannot be read"
    case $generation in '' | *[!0-9a-f]*) fail 2 "the release is not for this node: it names no bundle of \"$reply\"" ;; esac
    told="$counter $generation"
}

verify_kept() {
    [ -f "$1/release" ] || fail 2 "it came without a release, before signers were pinned"
    verify_signatures "$1" || fail 2 "$refused"
    grep -q -x -F -e "$2" "$1/release" || fail 2 "its release does not name it"
}

# ---------------------------------------------------------------- Automation
# The signer called automation is no approver. Its signature is enough for a bundle that brings endpoints only, which is a
# matter of files: those of frontends stay as an approver signed them, and a dispatch file holds only lines that an approved
# frontends.allow lists. So automation can do what a writer of EndpointSlices can do, and nothing else.

# reply is what a file of a bundle is about. A name that is not known counts as frontends, which only an approver may change.
file_kind() {
    case $1 in
        iptables-1-endpoints.rules | ip6tables-1-endpoints.rules | nftables-1-endpoints.nft | nftables-4-drop.nft) reply=endpoints ;;
        ipset-2-endpoints.rules | ipvs-2-endpoints.rules | haproxy.diff | health.counts) reply=endpoints ;;
        conntrack.udp | conntrack.udp.diff | services.jsonl | services.jsonl.diff) reply=endpoints ;;
        iptables-2-dispatch.rules | ip6tables-2-dispatch.rules | nftables-2-dispatch.nft) reply=dispatch ;;
        iptables.rules | ip6tables.rules) reply=marked ;;    # ipvs mode: frontends, and the marker of the generation
        *) reply=frontends ;;
    esac
}

# reply is the lines of the manifest in directory $1 that list files of frontends.
frontends_of() {
    local line name lines
    lines=''
    while IFS= read -r line; do
        case $line in '    "'*'": "'*) ;; *) continue ;; esac
        name=${line#*\"}
        file_kind "${name%%\"*}"
        [ "$reply" != frontends ] || lines=$lines${line%,}$NL
    done <"$1/manifest.json"
    reply=$lines
}

# End, naming the first of the files that the manifest lines $1 list and the lines $2 do not, if there is one.
only_listed() {
    local line
    while IFS= read -r line; do
        case $NL$2$NL in *"$NL$line$NL"*) continue ;; esac
        line=${line#*\"}
        beyond_endpoints "${line%%\"*} $3"
    done <<END
${1%"$NL"}
END
}

beyond_endpoints() { fail 2 "the release is signed by automation alone, which may change endpoints only: $1; an approver has to sign it"; }

verify_endpoints() {
    local bundle kind dir came
    bundle=$1 kind=$2
    shift 2
    [ $# -gt 0 ] || fail 2 "a first bundle needs an approver: the release is signed by automation alone"
    frontends_of "$bundle"
    came=$reply
    [ "$kind" = Delta ] || for dir; do
        frontends_of "$dir"
        if [ "$dir" != "$1" ]; then only_listed "$reply" '' "was changed by a delta, and a whole bundle is compared with the last whole one"
        else
            only_listed "$came" "$reply" "is another"
            only_listed "$reply" "$came" "is another, or missing"
            came=''
        fi
    done
    only_listed "$came" '' "came"
    lines_allowed "$bundle" "$kind" "$@"
}

# End unless the other files of bundle $1 of kind $2 fit what is recorded in the directories after them, see automation.awk.
lines_allowed() {
    local bundle kind snapshot dirs dir name
    bundle=$1 kind=$2 snapshot=$3
    shift 2
    dirs=$*
    set --
    for dir in "$bundle"/*; do
        name=${dir##*/}
        file_kind "$name"
        case $reply:$name in
            dispatch:iptables*) set -- "$@" what=dispatch family=4 "$dir" ;;
            dispatch:ip6tables*) set -- "$@" what=dispatch family=6 "$dir" ;;
            dispatch:*) set -- "$@" what=commands "$dir" ;;
            marked:*) set -- "$@" what=come "$dir" ;;
            *:ipvs-2-endpoints.rules) set -- "$@" what=servers "$dir" ;;
        esac
    done
    [ $# -gt 0 ] || return 0
    for dir in $dirs; do
        for name in allow:frontends.allow virtual:ipvs-1-frontends.rules had:iptables.rules had:ip6tables.rules; do
            [ ! -s "$dir/${name#*:}" ] || set -- "$@" what="${name%%:*}" taken="${dir#"$snapshot"}" "$dir/${name#*:}"
        done
    done
    refused=$(awk -v kind="$kind" "$automation_awk" "$@") || fail 3 "what changes cannot be told from endpoints"
    [ -z "$refused" ] || beyond_endpoints "$refused"
}

[ -e "$ETC/allowed_signers" ] || fail 2 "no signers are pinned here ($ETC/allowed_signers)"
case ${1:-} in
    bundle | release | kept | endpoints) reply=$1; shift; "verify_$reply" "$@" ;;
    *) fail 2 "usage: akp-verify bundle|release|kept|endpoints DIR ..." ;;
esac
# Last, so that a part of this program never says it.
printf 'ok %s\n' "$told"
