# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- Release
# Where allowed signers are pinned, akp-verify has to agree: a bundle is applied only with a release that names it and that enough of
# them signed. counter is that release's. automated: only automation has signed.

# True if this host applies signed bundles only.
signed_only() { [ -e "$ETC/allowed_signers" ] || [ -L "$ETC/allowed_signers" ]; }

# Ask akp-verify. False if it says no; reply is its answer, or the reason. Ends with 3 if it cannot be asked.
ask_verify() {
    local code
    code=0
    [ -f "$VERIFY" ] && [ -O "$VERIFY" ] && [ ! -L "$VERIFY" ] || die 3 "missing program: $VERIFY, see akp program --part verify: this node pins signers"
    reply=$(AKP_STATE=$STATE AKP_ETC=$ETC sh "$VERIFY" "$@" 2>/dev/null) || code=$?
    # A broken program does not come to say ok.
    case $code$reply in 0ok*) reply=${reply#ok} reply=${reply# } ;; 2?*) return 2 ;; *) die 3 "$VERIFY cannot tell: ${reply:-no answer}" ;; esac
}

# reply is the line by which a release names the bundle that b_* describe.
release_line() {
    reply="bundle $b_node $b_generation $b_digest"
    [ "$b_kind" != Delta ] || reply="delta $b_node $b_base $b_generation $b_digest"
}

# End with 2 unless the release in $bundle lets this host take what b_* describe. Needs the head of the bundle only.
check_release() {
    if ! signed_only || [ "$released" = "$b_digest" ] || { [ -n "$unsigned" ] && [ "$verb" = check ]; }; then return 0; fi
    release_line
    ask_verify bundle "$bundle" "$reply" || die 2 "$reply"
    automated=${reply#"${reply%% *}"} released=$b_digest
    take_counter "${reply%% *}"
    cap_confirm
}

# Where automation alone has signed, end with 2 unless the bundle changes endpoints of the record only. The lock is held. A delta that
# does not begin at the record is not taken anyway.
check_automation() {
    [ -n "$automated" ] || return 0
    [ "$b_mode/$b_node" = "${r_mode:-$b_mode}/${r_node:-$b_node}" ] ||
        die 2 "the release is signed by automation alone, which may change endpoints only: mode or node is another"
    if [ "$b_kind" = Delta ] && [ "$b_base" != "${r_generation:-$b_base}" ]; then return 0; fi
    ask_verify endpoints "$bundle" "$b_kind" $r_dirs || die 2 "$reply"
}

# A signer who is still allowed has signed the kept bundle in directory $1. If not, a rollback ends with 2. A restore warns: a revoked
# key must not cost a node its rules at boot.
check_kept_release() {
    signed_only || return 0
    release_line
    if ask_verify kept "$1" "$reply"; then return 0; fi
    if [ "$verb" = rollback ]; then die 2 "the kept generation $b_generation cannot be applied: $reply"; fi
    warn "the recorded generation $b_generation would not be taken any more: $reply"
}

take_counter() { case $1 in '' | *[!0-9]*) die 3 "$VERIFY gave no counter" ;; *) counter=$1 ;; esac; }

# End with 2 if the release is older than the one applied last: reply. akp-verify looked before the lock was held.
check_age() {
    reply=0
    [ ! -r "$STATE/counter" ] || read -r reply <"$STATE/counter" || :
    case $reply in '' | *[!0-9]* | ????????????????*) reply=0 ;; esac
    [ "${counter:-$reply}" -ge "$reply" ] || die 2 "release replayed: it is older than the one applied last (counter $counter after $reply)"
}

# Nothing older than the release counts from now on. The lock is held.
note_release() {
    [ -n "$counter" ] || return 0
    check_age
    [ "$counter" = "$reply" ] || write_file "$STATE/counter" "$counter"
}

# End with 2 if this host pins signers and does not let $verb run without a signature: unsigned VERB... in node.conf, by default rollback.
check_unsigned_verb() {
    if ! signed_only || [ -n "$dry_run" ]; then return 0; fi
    cap_confirm
    setting unsigned rollback
    case " $reply " in *" $verb "*) return 0 ;; esac
    die 2 "$verb comes without a signature, and this node pins signers; root allows it by $ETC/node.conf: unsigned $verb"
}

# A signature does not cover how long a change waits for its confirmation, and nothing else is taken meanwhile.
cap_confirm() {
    [ "${confirm_within:-0}" -gt 600 ] || return 0
    warn "--confirm-within is limited to 600 s on a node that pins signers"
    confirm_within=600
}

# Put the program of the applied whole bundle where node.conf says (program PATH), and its akp-leave beside it.
install_program() {
    local dir
    setting program
    if [ -z "$reply" ] || [ "$b_kind" = Delta ] || ! has_file akp-node || cmp -s "$bundle/akp-node" "$reply"; then return 0; fi
    dir=${reply%/*}
    { [ ! -L "$dir" ] && [ -O "$dir" ] && { ! has_file akp-leave || place_program akp-leave "$dir/akp-leave"; } &&
        place_program akp-node "$reply"; } || warn "setting program: $reply is not the path of a file in a directory of root"
}
place_program() { [ ! -d "$2" ] && rm -f "$2.akp-new" && cp "$bundle/$1" "$2.akp-new" && chmod 755 "$2.akp-new" && mv "$2.akp-new" "$2"; }

# Verify the release in directory $1 for akp-pull. If it names the generation in force, its counter is noted at once.
verb_release() {
    local generation
    signed_only || die 2 "no signers are pinned here ($ETC/allowed_signers)"
    ask_verify release "$1" || die 2 "$reply"
    generation=${reply#* }
    take_counter "${reply% *}"
    if [ "$generation" = "$r_generation" ] && [ -z "$dry_run" ]; then
        lock
        check_age
        [ "$generation" != "$r_generation" ] || note_release
    fi
    put_text generation "$generation"
    put counter "$counter"
    answer
}
