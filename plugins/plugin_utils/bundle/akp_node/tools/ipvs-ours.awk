# Prints "-D OPTION SERVER" for each virtual server in the kernel that is ours and not wanted. It is ours if something of ours
# names it: a bundle, kube-ipvs0 or a set; unless it is inside an excluded network.
function ours(option, server,   proto, ip, port) {
    if ((option " " server) in named) return 1
    proto = option == "-t" ? "tcp" : option == "-u" ? "udp" : "sctp"
    ip = address_of(server)
    port = server
    sub(/.*:/, "", port)
    return ip in bound || (ip "," proto ":" port) in inset || (proto ":" port) in inset
}
pass == "named" { if ($1 == "-A") named[$2 " " $3] = 1; next }
pass == "wanted" { wanted[$1 " " $2] = 1; next }
$1 == "exclude" { pin("OTHERS", $2); next }
$1 == "add" && our_set($2) {
    if ($2 ~ /NODE-PORT-TCP$/) inset["tcp:" $3] = 1
    else if ($2 ~ /NODE-PORT-UDP$/) inset["udp:" $3] = 1
    else if ($3 ~ /^[^,]+,[a-z]+:[0-9]+$/) inset[$3] = 1
}
$3 == "inet" || $3 == "inet6" { sub(/\/.*/, "", $4); bound[$4] = 1 }
$1 == "-A" && $2 ~ /^(-t|-u|--sctp-service)$/ && !(($2 " " $3) in wanted) && ours($2, $3) && !within("OTHERS", bits_of($3)) { print "-D " $2 " " $3 }
