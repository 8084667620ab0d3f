# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-metrics - leave akp.prom for the textfile collector of Prometheus' node_exporter, where node.conf says (textfile DIR).
#
#   akp-metrics pull              how the last poll ended; akp-pull runs it
#   akp-metrics look [--verify]   compare the kernel with what was applied; for cron, on nodes that are pushed to as well
#
# In the state directory, pull/metrics holds what was written last; the counts go on from there.
set -eu
umask 077
LC_ALL=C
PATH=${AKP_PATH:+$AKP_PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}
export LC_ALL PATH
STATE=${AKP_STATE:-/var/lib/akp} ETC=${AKP_ETC:-/etc/akp}

# End with a message and exit code 1.
fail() {
    printf 'no metrics: %s\n' "$1" >&2
    exit 1
}

# include tools/put-file.sh

# Print the value of a member of the answer $2: a word or a number.
member() { printf '%s\n' "$2" | sed -n "s/.*\"$1\": \"\{0,1\}\([A-Za-z0-9.]*\).*/\1/p"; }

verb=${1:-} verify=${2:-} folder='' me='' node=${AKP_NODE_PROGRAM:-${0%/*}/akp-node}
case $verb:$verify in pull: | look: | look:--verify) ;; *) fail "usage: akp-metrics pull | look [--verify]" ;; esac
[ -r "$ETC/node.conf" ] || exit 0
while read -r key value || [ -n "$key" ]; do
    case $key in textfile) folder=${value%/} ;; node) me=$value ;; esac
done <"$ETC/node.conf"
[ -n "$folder" ] || exit 0
[ -d "$folder" ] || fail "there is no directory $folder"
[ -d "$STATE" ] || { rm -f "$folder/akp.prom" && exit 0; }
if [ -L "$STATE" ] || [ ! -O "$STATE" ]; then fail "the directory $STATE does not belong to root"; fi

code=0 drift=''
case $verb in
    pull) answer=$(cat "$STATE/pull/last") || fail "no poll has ended yet" ;;
    look) answer=$(sh "$node" status ${verify:+--verify} </dev/null | tail -n 1) || : ;;
esac
case $answer in *'"ok": true'*) ;; *) code=$(member code "$answer") ;; esac
case $answer in *'"drift": '*) drift=$(member drift "$answer") ;; *'"state": "applied"'* | *'"state": "absent"'*) drift=0 ;; *) drift=1 ;; esac

r_generation='' r_mode='' r_node='' r_time='' r_ports=''
[ ! -r "$STATE/record" ] || while IFS='=' read -r key value; do
    case $key in generation) r_generation=$value ;; mode) r_mode=$value ;; node) r_node=$value ;; time) r_time=$value ;; ports) r_ports=$value ;; esac
done <"$STATE/record"
# After a cleanup there is nothing to tell.
if [ "$verb" = look ] && [ -z "$r_generation" ]; then
    rm -f "$folder/akp.prom" "$STATE/pull/metrics"
    exit 0
fi
[ -d "$STATE/pull" ] || mkdir "$STATE/pull" || fail "$STATE cannot be written"
[ -f "$STATE/pull/metrics" ] || : >"$STATE/pull/metrics"
awk -v verb="$verb" -v code="${code:-3}" -v seconds="$(member seconds "$answer")" -v time="$(date +%s)" -v applied="$r_time" -v node="${r_node:-${me:-$(uname -n)}}" \
    -v generation="$r_generation" -v mode="$r_mode" -v drift="$drift" -v ports="${r_ports:-0}" -v fetched="$(member fetched "$answer")" \
    "$metrics_awk" "$STATE/pull/metrics" >"$STATE/pull/metrics.new" || fail "$STATE cannot be written"
mv "$STATE/pull/metrics.new" "$STATE/pull/metrics"
put_file "$STATE/pull/metrics" "$folder/akp.prom" || fail "$folder cannot be written"
