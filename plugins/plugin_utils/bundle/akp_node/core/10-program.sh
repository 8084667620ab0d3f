# shellcheck shell=sh disable=SC2123,SC2034,SC2154,SC3043
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-node - make this host's kernel equal to a bundle.
#
# A bundle is a directory of files that the host's own tools read, and a manifest with their digests. This program loads files; it
# computes no rules and knows nothing of Kubernetes: verify (digests, signatures), allow-list (shapes), lock, load, record.
# A host holds one whole bundle, the snapshot, and a log of deltas taken since, byte for byte as they came. A generation has a marker
# in the kernel, named after it. A delta deletes the marker of its base and makes its own in one transaction, so the kernel itself
# refuses a delta that does not fit. awk programs and tables of allowed lines are variables named *_awk and *_shapes.
set -eu
umask 077
LC_ALL=C
# No caller chooses what root runs: a PATH that came through sudo does not count. AKP_PATH is for tests; sudo drops it.
[ -z "${SUDO_UID:-}" ] || PATH=''
PATH=${AKP_PATH:+$AKP_PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}
export LC_ALL PATH

VERSION=0.2.0
STATE=${AKP_STATE:-/var/lib/akp}                 # the record
RUN=${AKP_RUN:-/run/akp}                         # work files
ETC=${AKP_ETC:-/etc/akp}                         # what the owner of this host pins
VERIFY=${AKP_VERIFY:-/usr/local/sbin/akp-verify} # has to agree where signers are pinned
HEALTH=${AKP_HEALTH:-/usr/local/sbin/akp-health} # keeps the sockets of health checks
LOCK_WAIT=${AKP_LOCK_WAIT:-30}                   # seconds to wait for another run
KEEP=${AKP_KEEP:-}                               # states that rollback can reach, default 3
CHUNK=${AKP_CHUNK:-2000}                         # lines of a staging transaction
MAX_BUNDLE=${AKP_MAX_BUNDLE:-256}                # megabytes of a bundle, unpacked
MAX_STREAM=64000000                              # bytes on stdin
MAX_LOG=1000                                     # deltas after a snapshot
SMALL=300                                        # service ports up to which ask compares every rule
FAMILIES='4 6'
FULL='(is the disk full?)'
NL='
'

# The globals; all else is local. A function gives back reply, or the global that its comment names.
verb='' operand=''    # what this run was asked to do, and its options:
verify='' dry_run='' unsigned='' node_wanted=${AKP_NODE:-} max_removed='' confirm_within='' known=''
work='' locked='' waited=0    # private directory below $RUN, gone when the run ends; the lock
bundle=''             # directory of the incoming bundle, a private copy; below $STATE if it may be recorded
dirs=''               # what the kernel is to become: a bundle directory, and those of deltas after it
# b_*: the manifest of what is wanted; r_*: the record, what is in force; previous: the generation before this run
b_kind='' b_base='' b_mode='' b_node='' b_generation='' b_ports=0 b_endpoints=0 b_names='' b_sums='' b_digest=''
r_snapshot='' r_deltas=0 r_generation='' r_mode='' r_node='' r_flavour='' r_time='' r_ports=0 r_endpoints=0 r_unset='' r_kept='' r_dirs=''
previous='' state=''  # state: what find_state found
flavour=''            # of iptables: nft or legacy
counter='' automated='' released=''    # of the release: see ask_verify
# u_*: the note of the change that waits for its confirmation, left: for how many seconds; see confirm
u_token='' u_generation='' u_previous='' u_boot='' u_deadline=0 u_within='' left=0 boot=''
d_generation='' d_reason='' d_time=''          # the last change that was undone
# This run: token of its change, it armed it, the note before; it undoes a change
armed='' new_arm='' old_note='' undoing=''
# This run: it read akp-leave, added this directory to the bundles, made before/, marked a change of mode
leave_read='' kept_now='' made_before='' switching=''
changed=false as_before=true unfinished='' stays='' synced='' changed_sysctls=0 unset_sysctls='' flows=0 flows_due=''
members='' warnings='' answered='' started=0 now=0    # the answer; hundredths of a second since boot
refused=''            # why the last step failed, one line
reply=''
