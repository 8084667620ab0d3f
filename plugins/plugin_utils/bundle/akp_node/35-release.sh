# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Releases
# Where allowed signers are pinned, a bundle is applied only with a release: a text that names it, and detached
# signatures of that text. It lies beside the manifest as release, release.sig, release.1.sig, ...
#   akp-release 1
#   cluster NAME
#   counter N                          milliseconds since the epoch when it was made; never goes back
#   expires SECONDS                    since the epoch
#   bundle NODE GENERATION DIGEST      the digest of the manifest
#   delta NODE BASE GENERATION DIGEST
#   object DIGEST SHA256 BYTES         the archive in which a carrier finds that bundle or delta
#   note TEXT                          for people
NAMESPACE=akp-release
RELEASE_LIMIT=4000000   # bytes of a release, and of each signature
unsigned=               # check: a bundle that nobody signed yet
trusted=                # set by verbs that apply what was verified before it was kept
counter=                # of the release that the bundle came with
signers=                # " alice bob ": whose signatures of it are good

# Must what is applied here be released?
signed_only() { [ -e "$ETC/allowed_signers" ]; }

# The bundle that was opened, which came in directory $1, is released for this node; otherwise refuse (2).
check_release() {
    counter='' signers=' '
    if [ -n "$trusted" ] || ! signed_only; then return 0; fi
    if [ -n "$unsigned" ] && [ "$verb" = check ]; then return 0; fi
    copy_release "$1"
    verify_release
    cover_bundle
    count_signers
}

# A private copy of the release and its signatures: what is verified is what is read.
copy_release() {
    [ -f "$1/release" ] || die 2 "unsigned: this node takes only what its signers released ($ETC/allowed_signers), and no release came with this bundle. Publish it with akp publish, or have its plan approved"
    rm -rf "$work/release"
    mkdir "$work/release"
    for file in "$1/release" "$1/release.sig" "$1"/release.[0-9].sig "$1"/release.[0-9][0-9].sig; do
        [ -f "$file" ] || continue
        head -c "$RELEASE_LIMIT" "$file" >"$work/release/${file##*/}" || die 3 "$file cannot be copied (is ${TMPDIR:-/tmp} full?)"
    done
}

# Somebody who may has signed it, it is of this cluster, neither expired nor older than what was applied.
verify_release() {
    verify_signatures
    trouble='' cluster='' counter='' expires=''
    eval "$(release_values)"
    [ -z "$trouble" ] || die 2 "release: $trouble"
    mine=$(setting cluster)
    [ -n "$mine" ] || die 2 "$ETC/node.conf does not say which cluster this node is of; add a line: cluster NAME (the release is of cluster \"$cluster\")"
    [ "$cluster" = "$mine" ] || die 2 "the release is of cluster \"$cluster\", this node is of cluster \"$mine\""
    check_age
}

# Refuse a release that is older than the one applied last, or expired. Asked once more under the lock.
check_age() {
    [ -n "$counter" ] || return 0
    last=$(applied_counter)
    why=$(awk -v counter="$counter" -v last="${last:-0}" -v expires="$expires" -v now="$(date +%s)" 'BEGIN {
        if (counter + 0 < last + 0) print "replayed: it is older than the one applied last (counter " counter " after " last ")"
        else if (expires + 0 <= now + 0) print "expired " now - expires " s ago: publish or approve anew (or is the clock of this host wrong?)"
    }')
    [ -z "$why" ] || die 2 "release $why"
}

# Good signatures and whose they are, in $signers. A signer counts once, however many keys or signatures.
verify_signatures() {
    need ssh-keygen openssh-client
    signers=' '
    refused='it has no signature'
    for sig in "$work/release"/release*.sig; do
        [ -f "$sig" ] || continue
        who=$(ssh-keygen -Y find-principals -f "$ETC/allowed_signers" -s "$sig" 2>"$work/keygen") || {
            if grep -q -i -e 'unknown option' -e 'illegal option' -e 'unsupported operation' -e usage "$work/keygen"; then
                die 3 "missing feature: ssh-keygen -Y (OpenSSH 8.2 or newer), without it releases cannot be verified"
            fi
            refused="${sig##*/} is of nobody in $ETC/allowed_signers, or broken"
            continue
        }
        who=${who%%,*}
        who=${who%%
*}
        case $who in '' | *[!A-Za-z0-9@._+=-]*)
            refused="${sig##*/}: signer \"$who\" in $ETC/allowed_signers is not a plain name"
            continue
            ;;
        esac
        set -- -f "$ETC/allowed_signers" -I "$who" -n "$NAMESPACE" -s "$sig"
        if [ -e "$ETC/revoked_signers" ]; then set -- "$@" -r "$ETC/revoked_signers"; fi
        if ssh-keygen -Y verify "$@" <"$work/release/release" >/dev/null 2>"$work/keygen"; then
            case $signers in *" $who "*) ;; *) signers="$signers$who " ;; esac
        else
            refused="${sig##*/} by $who does not fit the text, or may not count: $(head -n 1 "$work/keygen")"
        fi
    done
    [ "$signers" != ' ' ] || die 2 "the release is not signed by anybody allowed: $refused"
}

# The values of the release as assignments for the shell; whatever is not as it must be is $trouble.
release_values() {
    awk '
        function bad(why) { print "trouble=\047line " NR " " why "\047"; failed = 1; exit }
        function once(name) { if (seen[name]++) bad("says " name " twice") }
        NR == 1 { if ($0 != "akp-release 1") bad("is not akp-release 1; a newer node program may be needed"); next }
        /^cluster [A-Za-z0-9][A-Za-z0-9._-]*$/ { once("cluster"); out = out "cluster=\047" $2 "\047\n"; next }
        /^(counter|expires) [0-9]+$/ && length($2) < 16 { once($1); out = out $1 "=" $2 "\n"; next }
        $1 == "bundle" && NF == 4 || $1 == "delta" && NF == 5 || $1 == "object" && NF == 4 || $1 == "note" { next }
        { bad("is not a line of a release") }
        END {
            if (failed) exit
            if (seen["cluster"] + seen["counter"] + seen["expires"] != 3) { NR = "after the last"; bad("is missing: cluster, counter and expires") }
            print out
        }' "$work/release/release"
}

# The release names exactly this bundle or delta, for this node.
cover_bundle() {
    me=$(this_node)
    [ "$node" = "$me" ] || die 2 "the bundle is for node \"$node\", this is \"$me\" (if not, say so in $ETC/node.conf: node NAME)"
    if [ "$kind" = Delta ]; then line="delta $node $base $generation $digest"; else line="bundle $node $generation $digest"; fi
    grep -q -x -F -e "$line" "$work/release/release" || die 2 "the release does not name this bundle (node $node, generation $generation, digest $digest)"
}

# Which Node this host is: pinned, or its name.
this_node() {
    pinned=$(setting node)
    if [ -n "$pinned" ]; then printf '%s' "$pinned"; else uname -n | tr '[:upper:]' '[:lower:]'; fi
}

# As many approvers as node.conf asks for; or automation, if that is enough or $1 says that nothing is new.
count_signers() {
    wanted=$(setting signatures 1)
    approvers=$(printf '%s' "$signers" | sed 's/ automation / /')
    count_words "$approvers"
    found=$words
    if [ "$found" -lt "$wanted" ] && [ "$approvers" != "$signers" ]; then
        # A counter is a time, and nothing older counts any more: with one of next year, approvers would be locked out.
        awk -v counter="$counter" -v now="$(date +%s)" 'BEGIN { exit counter / 1000 > now + 86400 }' ||
            die 2 "the release is signed by automation alone, and its counter $counter is more than a day ahead (or is the clock of this host wrong?)"
        [ "${1:-}" = same ] || automation_suffices
        return 0
    fi
    [ "$found" -ge "$wanted" ] || die 2 "the release has good signatures of $found signers ($signers), this node wants $wanted ($ETC/node.conf: signatures)"
}

applied_counter() { [ ! -r "$STATE/counter" ] || head -c 16 "$STATE/counter"; }

# What the release is for is done: nothing older counts from now on. For those who hold the lock.
note_release() {
    [ -n "$counter" ] && [ "$counter" != "$(applied_counter)" ] || return 0
    printf '%s\n' "$counter" >"$STATE/counter.new"
    mv "$STATE/counter.new" "$STATE/counter"
}

