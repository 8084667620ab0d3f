# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Metrics
# With the setting textfile, verbs that change or compare the kernel leave akp.prom in that directory, for the textfile
# collector of Prometheus' node_exporter. Names are kube-proxy's where they mean the same. The file is also where the
# counts so far are read from; whoever deletes it resets them, which Prometheus takes for a restart.

# Say how a run ended, $1 its exit code. Never fails: it is the last thing of a run that has answered already.
metrics_write() {
    case $verb in apply | rollback | restore | undo | pull | status | cleanup) ;; *) return 0 ;; esac
    if [ -n "$dry_run" ] || ! has_settings; then return 0; fi
    folder=$(setting textfile)
    [ -n "$folder" ] || return 0
    if [ "$verb/$1" = cleanup/0 ]; then
        rm -f "$folder/akp.prom"
        return 0
    fi
    [ "$verb" != cleanup ] || return 0
    [ -d "$folder" ] || {
        say "no metrics: there is no directory $folder"
        return 0
    }
    before=/dev/null
    if [ -e "$folder/akp.prom" ]; then before=$folder/akp.prom; fi
    {
        metrics_text "$1" <"$before" >"$folder/akp.prom.new" && chmod 0644 "$folder/akp.prom.new" &&
            mv "$folder/akp.prom.new" "$folder/akp.prom"
    } || {
        rm -f "$folder/akp.prom.new"
        say "no metrics: $folder cannot be written"
    }
}

# The metrics after this run, from those before it on stdin.
metrics_text() {
    there=
    services_file=$STATE/bundles/$r_digest/services.jsonl
    if [ -r "$services_file" ]; then there=$(wc -l <"$services_file"); fi
    elapsed
    awk -v verb="$verb" -v code="$1" -v seconds="$elapsed" -v time="$(date +%s)" -v applied="$r_time" \
        -v node="${r_node:-$(setting node "$(uname -n)")}" -v generation="$r_generation" -v mode="$r_mode" \
        -v state="${state:-}" -v drift="${drift:-null}" -v services="${there:-0}" \
        -v fetched="${fetched:-}" -v inner="${ended:-0}" '
        function head(name, type, help) { printf "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type }
        function gauge(name, help, labels, value) {
            if (value == "") return
            head(name, "gauge", help)
            printf "%s%s %s\n", name, labels, value
        }
        /^#/ || NF != 2 || $2 !~ /^[0-9.]+$/ { next }
        { was[$1] = $2 }
        END {
            gsub(/["\\\\]/, "", node)
            me = "{node=\"" node "\"}"
            queued = was["kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"]
            synced = was["kubeproxy_sync_proxy_rules_last_timestamp_seconds"]
            looked = was["akp_node_checked_timestamp_seconds" me]
            failed = was["akp_node_last_run_failed" me]
            off = was["akp_node_drift" me]
            if (verb == "status") {
                if (code == 0) {
                    looked = time
                    off = drift != "null" ? drift + 0 : (state == "applied" || state == "absent" ? 0 : 1)
                }
            } else {
                queued = time - int(seconds)
                # A pull without an answer is no failure, but confirms nothing either.
                confirmed = code == 0 && (verb != "pull" || fetched == "new" || fetched == "unchanged")
                if (code != 0 || confirmed) failed = !confirmed
                if (confirmed) { synced = looked = time; off = 0 }
            }
            gauge("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "When a sync of this host was last begun.", "", queued)
            gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "When this host was last made, or found, equal to its bundle.", "", synced)
            n = split("0.001 0.002 0.004 0.008 0.016 0.032 0.064 0.128 0.256 0.512 1.024 2.048 4.096 8.192 16.384 +Inf", le, " ")
            base = "kubeproxy_sync_proxy_rules_duration_seconds"
            # What a pull applies or restores, that verb counts.
            done = verb != "status" && verb != "pull" && code == 0
            counted = verb != "status" && (verb != "pull" || !inner)
            head(base, "histogram", "How long syncs of this host took.")
            for (i = 1; i <= n; i++) {
                key = base "_bucket{le=\"" le[i] "\"}"
                printf "%s %d\n", key, was[key] + (done && (i == n || seconds + 0 <= le[i] + 0))
            }
            printf "%s_sum %.2f\n%s_count %d\n", base, was[base "_sum"] + (done ? seconds : 0), base, was[base "_count"] + done
            gauge("akp_node_last_run_failed", "1 if the last sync of this host failed.", me, failed "" == "" ? "" : failed + 0)
            head("akp_node_failures_total", "counter", "Syncs of this host that failed, by the exit code of akp-node.")
            for (i = 2; i <= 5; i++) {
                key = "akp_node_failures_total{node=\"" node "\",code=\"" i "\"}"
                printf "%s %d\n", key, was[key] + (counted && code == i)
            }
            gauge("akp_node_checked_timestamp_seconds", "When the kernel of this host was last compared with what was applied.", me, looked)
            gauge("akp_node_drift", "Differences between kernel and bundle at that moment; without --verify just 1 if there are any.", me, off)
            gauge("akp_node_applied_timestamp_seconds", "When the rules of this host last changed.", me, applied)
            if (generation != "") {
                gauge("akp_node_generation_info", "What is applied here.", "{node=\"" node "\",generation=\"" generation "\",mode=\"" mode "\"}", 1)
                gauge("akp_node_service_ports", "Service ports in the applied bundle.", me, services)
            }
        }'
}

