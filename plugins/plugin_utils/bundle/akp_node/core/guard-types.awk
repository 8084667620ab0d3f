# guard-types.awk (after addresses.awk) - is(TYPE, WORD): may the word stand in a hole <TYPE> of a shape? fam is the family, 4 or 6.
# Variables: accept_ports and proxy_ports "A-B"; vip_ranges and endpoint_ranges "CIDR,CIDR...", empty for no limit.
BEGIN {
    RANGE["ACCEPT_PORT"] = accept_ports == "" ? "30000-32767" : accept_ports
    RANGE["PROXY_PORT"] = proxy_ports == "" ? "20000-27999" : proxy_ports
    # Packets are never for: unspecified, loopback, link-local, multicast, broadcast; IPv4 in IPv6 (mapped, compatible, 6to4).
    pin("NEVER", "0.0.0.0/8,127.0.0.0/8,169.254.0.0/16,224.0.0.0/4,255.255.255.0/24,::/16,2002::/16,fe80::/10,ff00::/8")
    if (!pin("VIP", vip_ranges) || !pin("DEST", endpoint_ranges)) lacks("node.conf", "vip_ranges and endpoint_ranges are networks")
}

function is(type, w) {
    if (type == "HASH") return length(w) == 16 && w !~ /[^A-Z2-7]/
    if (type == "COMMENT") {
        if (w == last_comment) return 1
        if (length(w) > 255) why = "a comment of more than 255 characters"
        else if (w !~ /[^]A-Za-z0-9 .:;,\/>=+_[-]/) return (last_comment = w) == w
        return 0
    }
    if (type == "DEST" || type == "VIP" || type == "ADDR") return type == judged && substr(w, 1, length(prefix)) == prefix && (substr(w, length(prefix) + 1) in OCTET) || address(type, w)
    if (type == "PORT") return length(w) <= 5 && w ~ /^[1-9][0-9]*$/ && w + 0 <= 65535
    if (type == "NAME") return length(w) <= 240 && substr(w, 9, 1) == "-" && w ~ /^[A-Z2-7]+-[a-z0-9._\/-]+$/
    if (type in SEPARATOR) return each(type, w, SEPARATOR[type])
    if (type == "NUM") return length(w) <= 10 && w ~ /^(0|[1-9][0-9]*)$/
    if (type == "DIGITS") return length(w) <= 11 && w ~ /^[0-9]+$/
    if (type in RANGE) {
        split(RANGE[type], range, "-")
        if (is("PORT", w) && w + 0 >= range[1] + 0 && w + 0 <= range[2] + 0) return 1
        if (why == "") why = "only for ports " RANGE[type] " (" tolower(type) "s)"
        return 0
    }
    if (type == "NET") return network(w)
    if (type == "SERVICE") return length(w) <= 191 && w ~ /^[a-z0-9.:\/-]+$/
    if (type == "DOTTED") return length(w) <= 191 && w ~ /^[a-z0-9.-]+$/
    if (type == "LABEL") return length(w) <= 63 && w ~ /^[a-z0-9]([a-z0-9-]*[a-z0-9])?$/
    if (type == "DEV") return length(w) <= 16 && w ~ /^[A-Za-z0-9_.@][A-Za-z0-9_.@-]*[+*]?$/
    if (type == "BIT" || type == "BIT8") {  # of the mark: one, and the same in the whole bundle
        if (length(w) > 8 || type == "BIT8" && (length(w) < 8 || !sub(/^0*/, "", w))) return 0
        if (bit == "" && w ~ /^[1248]0*$/) bit = w
        return w != "" && w == bit
    }
    if (type == "JSON") return substr(w, length(w)) == "}" && w !~ /[^ -~]/
    return type == "TEXT" && w !~ /[^ -~]/ || type == "Q" && w == "\\\047"
}
function each(type, w, separator,   i, n, part) {
    n = split(w, part, separator)
    for (i = 1; i <= n; i++) if (!fits(ROOT[type], part[i] "\n")) return 0
    return n > 0
}
function network(w,   n, part) {
    n = split(w, part, "/")
    return address("ADDR", part[1]) && (n == 1 || n == 2 && part[2] ~ /^(0|[1-9][0-9]?[0-9]?)$/ && part[2] + 0 <= (fam == 4 ? 32 : 128))
}

# Is w an address and, unless kind is ADDR, one that packets may be for? What stands before its last part is judged once. The last that
# was good is kept: judged, prefix. Who sets fam sets judged = "".
function address(kind, w,   i, k, last) {
    for (last = w; (i = index(last, fam == 4 ? "." : ":")); ) last = substr(last, i + 1)
    if (fam == 4 ? !(last in OCTET) : !(last == "" && w ~ /::$/ || group(last))) return 0
    k = kind in FINE ? w : substr(w, 1, length(w) - length(last))
    if (!((kind, fam, k) in JUDGED)) JUDGED[kind, fam, k] = (last = bits(w)) != "" && (kind == "ADDR" || !within("NEVER", last) && (!(kind in PINNED) || within(kind, last)))
    if (JUDGED[kind, fam, k] && !(kind in FINE)) { judged = kind; prefix = k }
    if (!JUDGED[kind, fam, k] && kind != "ADDR") why = w " is no address for a " (kind == "DEST" ? "destination" : "frontend")
    return JUDGED[kind, fam, k]
}
# A generation as names of chains have it.
function short(name) { return toupper(substr(name, 1, 13)) }
