# addresses.awk - addresses as bits, and networks that hold them. fam is the family, 4 or 6.
BEGIN { for (i = 0; i < 256; i++) for (j = 128; j >= 1; j /= 2) OCTET[i] = OCTET[i] int(i / j) % 2 }

# The family and the bits of an address; nothing if it is not well-formed.
function bits(ip,   i, j, n, gap, text, part) {
    if (ip ~ /^:[^:]/) return ""
    if (ip ~ /::$/) ip = ip "0"
    n = split(ip ~ /^::/ ? substr(ip, 2) : ip, part, fam == 4 ? "." : ":")
    for (i = 1; i <= n; i++) {
        if (fam == 4 && part[i] in OCTET) text = text OCTET[part[i]]
        else if (fam == 6 && part[i] == "" && n < 9 && !gap++) while (length(text) < 16 * (8 - n + i)) text = text "0"
        else if (fam == 4 || !group(part[i])) return ""
        else for (j = -3; j <= length(part[i]); j++) if (j > length(part[i]) - 4) text = text substr(OCTET[j < 1 ? 0 : index("123456789abcdef", substr(part[i], j, 1))], 5)
    }
    return length(text) == (fam == 4 ? 32 : 128) ? fam text : ""
}
function group(w) { return w ~ /^(0|[1-9a-f][0-9a-f]?[0-9a-f]?[0-9a-f]?)$/ }

# Note the networks of a kind, "CIDR,CIDR..."; false if one is none. FINE are kinds with networks within the last part of an address.
function pin(kind, list,   n, cidr, part) {
    for (n = split(list, cidr, ","); n > 0; n--) {
        fam = cidr[n] ~ /:/ ? 6 : 4
        if (split(cidr[n], part, "/") != 2 || bits(part[1]) == "" || part[2] !~ /^[0-9]+$/) return 0
        PINNED[kind] = PINNED[kind] " " substr(bits(part[1]), 1, part[2] + 1)
        if (part[2] + 0 > (fam == 4 ? 24 : 112)) FINE[kind] = 1
    }
    return 1
}

# Is an address, as bits, in one of them?
function within(kind, b,   n, net) {
    for (n = split(PINNED[kind], net, " "); n > 0; n--) if (index(b, net[n]) == 1) return 1
    return 0
}
