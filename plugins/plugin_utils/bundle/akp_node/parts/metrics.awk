# The metrics after a run, from those before it. Names are those of kube-proxy where they mean the same.
function head(name, type, help) { printf "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type }
function gauge(name, labels, value, help) { if (value != "") { head(name, "gauge", help); printf "%s%s %s\n", name, labels, value } }
!/^#/ && NF == 2 && $2 ~ /^[0-9.]+$/ { was[$1] = $2 }
END {
    me = "{node=\"" node "\"}"; SYNC = "kubeproxy_sync_proxy_rules"; LOOK = "akp_node_checked_timestamp_seconds"
    queued = was[SYNC "_last_queued_timestamp_seconds"]; synced = was[SYNC "_last_timestamp_seconds"]
    looked = was[LOOK me]; failed = was["akp_node_last_run_failed" me]; off = was["akp_node_drift" me]
    # A pull without an answer is no failure, but confirms nothing either.
    confirmed = verb == "pull" && code == 0 && (fetched == "new" || fetched == "unchanged")
    if (verb == "look" && code == 0) { looked = time; off = drift }
    if (verb == "pull") queued = time - int(seconds)
    if (verb == "pull" && (code != 0 || confirmed)) failed = !confirmed
    if (confirmed) { synced = looked = time; off = 0 }
    gauge(SYNC "_last_queued_timestamp_seconds", "", queued, "When a sync of this host was last begun.")
    gauge(SYNC "_last_timestamp_seconds", "", synced, "When this host was last made, or found, equal to its bundle.")
    head(SYNC "_duration_seconds", "histogram", "How long syncs of this host took.")
    n = split("0.001 0.002 0.004 0.008 0.016 0.032 0.064 0.128 0.256 0.512 1.024 2.048 4.096 8.192 16.384 +Inf", le, " ")
    for (i = 1; i <= n; i++) {
        key = SYNC "_duration_seconds_bucket{le=\"" le[i] "\"}"
        printf "%s %d\n", key, was[key] + (confirmed && (i == n || seconds + 0 <= le[i] + 0))
    }
    printf "%s_sum %.2f\n", SYNC "_duration_seconds", was[SYNC "_duration_seconds_sum"] + (confirmed ? seconds : 0)
    printf "%s_count %d\n", SYNC "_duration_seconds", was[SYNC "_duration_seconds_count"] + confirmed
    gauge("akp_node_last_run_failed", me, failed "" == "" ? "" : failed + 0, "1 if the last sync of this host failed.")
    head("akp_node_failures_total", "counter", "Syncs of this host that failed, by exit code.")
    for (i = 2; i <= 5; i++) {
        key = "akp_node_failures_total{node=\"" node "\",code=\"" i "\"}"
        printf "%s %d\n", key, was[key] + (verb == "pull" && code == i)
    }
    gauge(LOOK, me, looked, "When the kernel of this host was last compared with what was applied.")
    gauge("akp_node_drift", me, off, "Differences between kernel and bundle at that moment; without --verify just 1 if there are any.")
    gauge("akp_node_applied_timestamp_seconds", me, applied, "When the rules of this host last changed.")
    if (generation == "") exit
    gauge("akp_node_generation_info", "{node=\"" node "\",generation=\"" generation "\",mode=\"" mode "\"}", 1, "What is applied here.")
    gauge("akp_node_service_ports", me, ports, "Service ports in the applied bundle.")
}
