# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2154,SC3043
# include tools/userspace.sh
# ---------------------------------------------------------------- Mode userspace
# Rules as in mode iptables lead to ports of this host, where proxies take endpoints in turn. Proxies change first and rules after:
# no rule leads to a port where nothing listens. $work/proxy has the files that are wanted, $PROXY those in force and their generation.
PEERS=127.0.0.1:10269    # by which a new HAProxy learns from the old one which client has which endpoint
said=''                  # what became of each proxy, for the answer

userspace_shapes() { shapes=$userspace_shapes checks=$iptables_guard_awk; }
userspace_markers() { iptables_markers; }
userspace_undo_before() { :; }
userspace_settle() { :; }
userspace_read() { iptables_read; }
userspace_report() { printf '"proxies": {%s}, ' "$said"; }

# Keep the kernel from giving the ports of proxies to other programs. What the owner of the host has reserved stays so.
userspace_before() {
    local file had range
    file=/proc/sys/net/ipv4/ip_local_reserved_ports
    setting proxy_ports 20000-27999
    range=$reply
    # Not by read, which takes a byte at a time: the kernel gives all of it or nothing.
    had=$(cat "$file" 2>/dev/null) || return 0
    case ",$had," in *",$range,"*) return 0 ;; esac
    if [ -w "$file" ]; then note_value "$file" "$had"; fi
    echo "$had${had:+,}$range" 2>/dev/null >"$file" || warn "the ports $range could not be reserved for proxies ($file)"
}

# reply is the file of proxy $1 in a bundle.
proxy_file() { case $1 in haproxy) reply=haproxy.cfg ;; *) reply=nginx.conf ;; esac; }

# True if $dirs has something for proxy $1; reply is the file.
proxy_wanted() { proxy_file "$1" && effective "$reply" && [ -s "$reply" ]; }

# End with 3 if a tool is missing.
userspace_preflight() {
    local name
    iptables_preflight
    for name in proxy_check proxy_connect proxy_hours proxy_reloads; do
        setting "$name" 1
        case $name/$reply in proxy_check/0) ;; */ | */0* | */*[!0-9]* | */?????*) die 2 "$ETC/node.conf: $name is a number from 1 to 9999, not $reply" ;; esac
    done
    ! proxy_wanted haproxy || need haproxy haproxy
    if proxy_wanted nginx; then
        need nginx nginx
        stream_module || die 3 "missing tool: the stream module of nginx (package libnginx-mod-stream)"
    fi
    by_systemd || return 0
    for name in $PROXIES; do
        proxy_wanted "$name" || continue
        proxy_unit "$name"
        systemctl cat "$reply" >/dev/null 2>&1 || die 3 "missing unit: $reply (the role prepare installs it)"
    done
}

# True if nginx can do it; reply is the line that loads it, empty if it is built in.
stream_module() {
    local file
    reply=''
    for file in /usr/lib/nginx/modules /usr/lib64/nginx/modules /usr/share/nginx/modules; do
        if [ -e "$file/ngx_stream_module.so" ]; then reply="load_module $file/ngx_stream_module.so;"; return 0; fi
    done
    nginx -V 2>&1 | grep -q -e '--with-stream '
}

# True if markers and jumps of generation $1 are there and the proxies of the bundle $2 run, each with its file.
userspace_look() {
    local name is
    iptables_look "$@" || return 1
    for name in $PROXIES; do
        proxy_file "$name"
        if [ -s "$2/$reply" ]; then proxy_runs "$name" && read -r is <"$PROXY/generation" && [ "$is" = "$1" ]; else ! proxy_runs "$name"; fi || return 1
    done 2>/dev/null
}

# Plan how the kernel and the proxies become $1.
userspace_plan() {
    local name dir diffs
    iptables_plan "$@"
    diffs=''
    for dir in "$@"; do [ ! -s "$dir/haproxy.diff" ] || diffs="$diffs $dir/haproxy.diff"; done
    rm -rf "$work/proxy"
    mkdir "$work/proxy" || die 3 "$work/proxy cannot be made $FULL"
    for name in $PROXIES; do
        if proxy_wanted "$name"; then
            if [ "$name" != haproxy ] || [ -z "$diffs" ]; then cp "$reply" "$work/proxy/part"; else haproxy_fold "$diffs" "$reply" "$work/proxy/part"; fi &&
                "${name}_text" "$work/proxy/part" >"$work/proxy/$name" && room || die 3 "the file of $name cannot be written $FULL"
            # After a run that was cut short, what a proxy has need not be what its file says.
            if ! proxy_runs "$name"; then reply=start
            elif [ -e "$STATE/unsettled" ]; then reply=reload
            elif proxy_file "$name" && proxy_same "$work/proxy/$name" "$PROXY/$reply"; then continue
            else reply=change
            fi
        elif proxy_runs "$name"; then reply=stop
        else continue
        fi
        echo "$reply" >"$work/proxy/$name.do"
        printf '{"kind": "proxy", "name": "%s", "wanted": "%s"}\n' "$name" "$reply" >>"$work/plan.4/detail"
    done
}

# True if two files tell a proxy the same. The description only names a process that has read the file.
proxy_same() { [ -e "$2" ] && sed '/^ *description /d' "$1" >"$work/one" && sed '/^ *description /d' "$2" | cmp -s - "$work/one"; }

userspace_pending() {
    local part
    if iptables_pending; then return 0; fi
    for part in "$work"/proxy/*.do; do [ ! -e "$part" ] || return 0; done
    return 1
}

# Print the whole file of HAProxy, with the part $1 of a bundle.
haproxy_text() {
    local hours reloads connect
    setting proxy_hours 24; hours=$reply
    setting proxy_reloads 16; reloads=$reply
    setting proxy_connect 500; connect=$reply
    proxy_directory haproxy
    cat <<END
global
    localpeer local
    description none
    stats socket $reply/haproxy.sock mode 600 level admin expose-fd listeners
    hard-stop-after ${hours}h
    mworker-max-reloads $reloads
END
    if ! by_systemd && id haproxy >/dev/null 2>&1; then printf '    user haproxy\n    group haproxy\n'; fi
    haproxy_checks
    cat - "$1" <<END
peers akp
    peer local $PEERS
defaults
    mode tcp
    balance roundrobin
    timeout connect ${connect}ms
    timeout check 1s
    timeout client 24d
    timeout server 24d
    retries 3
    option redispatch 1
    option tcpka
    default-server $reply
END
}

# reply is how HAProxy checks a server. A call that fails has it checked at once.
haproxy_checks() {
    setting proxy_check 10
    if [ "$reply" = 0 ]; then reply=weight\ 1; else reply="check inter ${reply}s fastinter 500ms downinter 1s fall 2 rise 1 observe layer4 error-limit 1 on-error fastinter"; fi
}

# The same for nginx. One worker: a client is the same to all of it.
nginx_text() {
    stream_module || :
    [ -z "$reply" ] || echo "$reply"
    proxy_directory nginx
    cat <<END
worker_processes 1;
pid $reply/nginx.pid;
error_log stderr;
END
    if ! by_systemd && id www-data >/dev/null 2>&1; then echo 'user www-data;'; fi
    cat - "$1" <<END
events {
    worker_connections 8192;
}
stream {
END
    echo '}'
}

# ---------------------------------------------------------------- userspace: commit
# Carry out the plan: proxies that come or change, rules, proxies that go. False with refused: then all is as before.
userspace_commit() {
    local name found
    if [ -e "$STATE/unsettled" ]; then found=1; else found=''; fi
    trap '' HUP INT TERM
    for name in $PROXIES; do
        case $(cat "$work/proxy/$name.do" 2>/dev/null) in start | change | reload) ;; *) continue ;; esac
        proxies_unsettled && proxy_change "$name" && continue
        userspace_undo
        proxies_settled "$found"
        return 1
    done
    iptables_commit || { userspace_undo; proxies_settled "$found"; return 1; }
    proxies_are "$b_generation"
    for name in $PROXIES; do
        [ "$(cat "$work/proxy/$name.do" 2>/dev/null)" = stop ] || continue
        proxy_stop "$name" || left_unfinished "$refused"
        proxy_file "$name"
        rm -f "$PROXY/$reply"
        said="$said${said:+, }\"$name\": \"stopped\""
    done
    proxies_settled "$found"
}

# Proxies change before the rules and the record, which do not show it: the mark does, to the run after one that is cut short. False
# with refused.
proxies_unsettled() { echo 2>/dev/null >"$STATE/unsettled" || { refused="$STATE cannot be written $FULL"; return 1; }; }

# Proxies and rules agree again. The mark goes, unless another run left it ($1).
proxies_settled() { [ -n "$unfinished$1" ] || rm -f "$STATE/unsettled"; }

# Have proxy $1 run with the file in $work/proxy. False with refused; what it had is in $work/proxy/NAME.old then.
proxy_change() {
    local file how
    proxy_file "$1"
    file=$PROXY/$reply how=started
    proxy_make_room || return 1
    proxy_runs "$1" || proxy_orphans "$1"
    "${1}_check" "$work/proxy/$1" && ports_free "$1" "$work/proxy/$1" "$file" || return 1
    rm -f "$work/proxy/$1.old"
    [ ! -e "$file" ] || cp "$file" "$work/proxy/$1.old" || return 1
    if proxy_runs "$1"; then
        if [ "$1 $(cat "$work/proxy/$1.do")" = 'haproxy change' ] && haproxy_servers "$file" "$work/proxy/haproxy"; then how=changed; else how=reloaded; fi
    fi
    proxy_write "$work/proxy/$1" "$file" || return 1
    : >"$work/proxy/$1.changed"
    case $how in
        started) proxy_start "$1" "$file" ;;
        reloaded) proxy_reload "$1" "$file" ;;
    esac || return 1
    said="$said${said:+, }\"$1\": \"$how\""
}

# Put file $1 in the place of the proxies' file $2. False with refused.
proxy_write() {
    refused="$PROXY cannot be written $FULL"
    cp "$1" "$2.new" && chmod 644 "$2.new" && mv "$2.new" "$2"
}

# What the proxies have is that of generation $1.
proxies_are() { [ ! -d "$PROXY" ] || echo "$1" 2>/dev/null >"$PROXY/generation" || warn "$PROXY/generation could not be written"; }

proxy_make_room() {
    refused="$PROXY cannot be made"
    [ -d "$PROXY" ] || mkdir -p "$PROXY" || return 1
    chmod 755 "$PROXY"
    by_systemd || [ -d "$PROXY/run" ] || { mkdir "$PROXY/run" && chmod 755 "$PROXY/run"; }
}

# What this run did to proxies is undone; refused stays.
userspace_undo() {
    local name why file
    why=$refused
    for name in $PROXIES; do
        [ -e "$work/proxy/$name.changed" ] || continue
        proxy_file "$name"
        file=$PROXY/$reply
        if [ -e "$work/proxy/$name.old" ]; then
            cp "$work/proxy/$name.old" "$file" && proxy_reload "$name" "$file"
        else proxy_stop "$name" && rm -f "$file"
        fi || left_unfinished "$name could not be put back: $refused"
    done
    [ -n "$r_generation" ] && [ "$r_mode" = userspace ] || rm -rf "$PROXY"
    refused=$why
}

haproxy_check() { haproxy -c -f "$1" >"$work/err" 2>&1 || { first_lines "$work/err" "haproxy -c"; return 1; }; }
# nginx makes the file for its process even to check; where that will be, there may be no directory yet.
nginx_check() {
    sed "s|^pid .*|pid $work/nginx.pid;|" "$1" >"$work/nginx.conf" && nginx -t -q -c "$work/nginx.conf" >"$work/err" 2>&1 ||
        { first_lines "$work/err" "nginx -t"; return 1; }
}

# True if no other program listens at a port that the file $2 has and $3, which is in force, has not; $1 is the proxy.
ports_free() {
    local tables
    tables='/proc/net/tcp /proc/net/tcp6'
    [ "$1" = haproxy ] || tables='/proc/net/udp /proc/net/udp6'
    [ -e "$3" ] && proxy_runs "$1" && set -- "$1" "$2" "$3" || set -- "$1" "$2" /dev/null
    refused=$(awk -v proxy="$1" '
        function number(hex,   i, n) { for (i = 1; i <= 4; i++) n = 16 * n + index("0123456789ABCDEF", substr(hex, i, 1)) - 1; return n }
        $1 == (proxy == "haproxy" ? "bind" : "listen") && (pass == "old" || pass == "new") {
            port = $2; sub(/.*:/, "", port)
            if (pass == "old") had[port]; else if (!(port in had)) want[port]
        }
        pass == "kernel" && ($4 == "0A" || proxy == "nginx") && sub(/.*:/, "", $2) && (number($2) in want) { print "port " number($2) " is taken by another program"; exit }
        ' pass=old "$3" pass=new "$2" pass=kernel $tables) || return 1
    [ -z "$refused" ]
}

# Start proxy $1 with file $2, and wait until it serves. False with refused. The lock is not for it to hold, and signals that this run
# ignores are to end it.
proxy_start() {
    [ "$1" != haproxy ] || haproxy_name "$2" || return 1
    proxy_unit "$1"
    if by_systemd; then systemctl start "$reply"
    elif [ "$1" = haproxy ]; then (trap - HUP INT TERM; exec haproxy -W -D -f "$2" -p "$PROXY/run/haproxy.pid") </dev/null 9>&-
    else (trap - HUP INT TERM; exec nginx -c "$2") </dev/null 9>&-
    fi >"$work/err" 2>&1 || { first_lines "$work/err" "$1 does not start"; return 1; }
    proxy_serves "$1" "$2"
}

# Have proxy $1 read file $2; connections that are open stay with the old process. False with refused.
proxy_reload() {
    local pid
    proxy_runs "$1" || { proxy_start "$@"; return "$?"; }
    pid=$reply
    [ "$1" != haproxy ] || haproxy_name "$2" || return 1
    proxy_unit "$1"
    if by_systemd; then systemctl reload "$reply" >"$work/err" 2>&1
    elif [ "$1" = haproxy ]; then kill -USR2 "$pid"
    else kill -HUP "$pid"
    fi 2>"$work/err" || { first_lines "$work/err" "$1 cannot be told to reload"; return 1; }
    proxy_serves "$1" "$2"
}

# Give file $1 of HAProxy a description that no other had: by it a process that has read the file is known.
named=0
haproxy_name() {
    named=$((named + 1))
    sed "s/^ *description .*/    description ${work##*/}.$named/" "$1" >"$work/named" && proxy_write "$work/named" "$1"
}

# Wait until proxy $1 has file $2. A reload is asynchronous, and one that fails leaves the old process serving.
proxy_serves() {
    local try wanted
    wanted=$(sed -n 's/^ *description //p' "$2")
    for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        if proxy_runs "$1"; then
            [ "$1" = haproxy ] || return 0
            haproxy_ask 'show info' >"$work/info" 2>/dev/null || { [ -n "$speaks" ] || return 0; }
            ! grep -q -x "[Dd]escription: $wanted" "$work/info" || return 0
        fi
        sleep 0.25 2>/dev/null || sleep 1
    done
    refused="$1 has not come up with its new file"
    return 1
}

# Tell HAProxy commands, with semicolons between, and print what it says. False if it does not answer, or nothing here can speak to it.
speaks=''
haproxy_ask() {
    local socket
    proxy_directory haproxy
    socket=$reply/haproxy.sock
    if has socat; then speaks=socat; echo "$1" | socat -t 5 - "UNIX-CONNECT:$socket"
    elif has perl; then
        speaks=perl
        # Not IO::Socket, which takes four times as long to load.
        perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0) && connect(S, sockaddr_un($ARGV[0])) or exit 1; syswrite S, "$ARGV[1]\n"; print while <S>' "$socket" "$1"
    else return 1
    fi
}

# Tell HAProxy of servers that come and go, if the files $1 and $2 differ in nothing else. False if a reload is needed.
haproxy_servers() {
    [ -e "$1" ] && awk "$userspace_servers_awk" pass=old "$1" pass=new "$2" >"$work/servers" || return 1
    : >"$work/proxy/haproxy.changed"
    haproxy_tell "$work/servers"
}

# Write file $2 of HAProxy to $3, with the servers that the files $1 take out and put in.
haproxy_fold() {
    awk '{ sign[substr($1, 2) " " $2] = substr($1, 1, 1) } END { for (server in sign) print server, sign[server] }' $1 >"$work/said" &&
        sort "$work/said" >"$work/sorted" && awk "$userspace_fold_awk" "$work/sorted" pass=file "$2" >"$3" && room
}

# Tell HAProxy of the servers of file $1: "-PROXY ENDPOINT" and "+PROXY ENDPOINT". False if it did not follow.
haproxy_tell() {
    local line batch count
    batch='' count=0
    haproxy_checks
    awk -v check="$reply" '{ name = $2; gsub(/[][]/, "", name); name = substr($1, 2) "/" name }
        /^[+]/ { print "add server " name " " $2 " " check (check ~ /^check/ ? "\nenable health " name : "") "\nenable server " name }
        /^-/ { print "disable server " name "\ndel server " name }
        END { print "" }' "$1" >"$work/commands" || return 1
    while read -r line; do
        # A line that HAProxy reads has room for some fifty of them.
        if [ -n "$line" ]; then batch="$batch${batch:+; }$line" count=$((count + 1)); fi
        if [ -n "$line" ] && [ "$count" -lt 50 ] || [ -z "$batch" ]; then continue; fi
        haproxy_ask "$batch" >"$work/told" 2>&1 || return 1
        # A server with connections gets no new ones, and the next reload ends it; until then it may come back. All else that HAProxy has
        # to say means that it did not follow.
        ! grep -v -i -e '^$' -e 'still has connections' -e 'already exists a server' -e 'New server registered' -e 'Server deleted' "$work/told" >/dev/null || return 1
        batch='' count=0
    done <"$work/commands"
}

# Take a delta: servers of HAProxy go and come, and the rules have another generation. False with refused. HAProxy is told first, as
# that is what clients wait for; what it is told is then put into its file.
userspace_delta() {
    local code
    code=0
    if [ -s "$1/haproxy.diff" ]; then
        refused="haproxy does not have generation $b_base"
        { read -r reply <"$PROXY/generation"; } 2>/dev/null && [ "$reply" = "$b_base" ] && proxy_runs haproxy || return 1
        trap '' HUP INT TERM
        proxies_unsettled || return 1
        refused="haproxy did not take the change of its servers"
        haproxy_tell "$1/haproxy.diff" && haproxy_keep "$1/haproxy.diff" || code=1
        [ "$code" != 0 ] || said='"haproxy": "changed"'
    fi
    [ "$code" != 0 ] || iptables_delta "$1" || code=$?
    if [ "$code" = 0 ]; then proxies_are "$b_generation"; return 0; fi
    [ ! -s "$1/haproxy.diff" ] || haproxy_as_before || code=2
    [ "$code" != 1 ] || proxies_settled ''
    return "$code"
}

# Put the servers that file $1 takes out and puts in into the file of HAProxy; what that was is in $work/haproxy.old. False with refused.
haproxy_keep() {
    refused="the file of haproxy cannot be written $FULL"
    cp "$PROXY/haproxy.cfg" "$work/haproxy.old" && haproxy_fold "$1" "$work/haproxy.old" "$work/haproxy.new" && proxy_write "$work/haproxy.new" "$PROXY/haproxy.cfg"
}

# HAProxy has again what it had before a delta. False if it may not; refused stays.
haproxy_as_before() {
    local why
    why=$refused
    [ ! -s "$work/haproxy.old" ] || proxy_write "$work/haproxy.old" "$PROXY/haproxy.cfg" || return 1
    proxy_reload haproxy "$PROXY/haproxy.cfg" || return 1
    refused=$why
}
