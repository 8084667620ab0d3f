/* A simulated Host Networking Service: what kube-proxy asks of computenetwork.dll and vmcompute.dll, and nothing else.
 *
 * It keeps networks, endpoints and load balancers as the JSON documents that it was given, in one file of lines, which is
 * read when the library is loaded and grows with every change:
 *
 *     version 13.2
 *     network {"ID":"...","Name":"pods",...}
 *     endpoint {"ID":"...",...}
 *     loadbalancer {"ID":"...",...}       a second line of an ID replaces the first
 *     delete endpoint ID
 *
 * The environment variable HNS_STORE names the file. With HNS_DIE_AFTER=N the process ends in the middle of a change, before
 * (N odd) or after (N even) it is made. With HNS_REFUSE=N the Nth change is refused. Two load balancers cannot have one frontend.
 * Documents are ASCII, and compact, as kube-proxy writes them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32 /* under Wine, for kube-proxy.exe */
#include <objbase.h>
#include <windows.h>
#define EXPORT __declspec(dllexport) HRESULT WINAPI
#define LOCK() EnterCriticalSection(&lock)
#define UNLOCK() LeaveCriticalSection(&lock)
static CRITICAL_SECTION lock;
#else /* on Linux, for akp-node.cs on mono */
#include <pthread.h>
#include <stdint.h>
#include <strings.h>
typedef int32_t HRESULT;
typedef uint16_t WCHAR;
typedef intptr_t INT_PTR;
typedef struct {
    uint32_t Data1;
    uint16_t Data2, Data3;
    unsigned char Data4[8];
} GUID;
#define EXPORT HRESULT
#define CoTaskMemAlloc malloc
#define _stricmp strcasecmp
#define LOCK() pthread_mutex_lock(&lock)
#define UNLOCK() pthread_mutex_unlock(&lock)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#endif

#define NOT_FOUND ((HRESULT)0x80070490)
#define DENIED ((HRESULT)0x80070005)
#define PORT_EXISTS ((HRESULT)0x803b0013)
#define MOST 65536
#define LONGEST (1 << 20)

enum kind { NETWORK, ENDPOINT, LOADBALANCER, KINDS };
static const char *const NAMES[KINDS] = {"network", "endpoint", "loadbalancer"};

struct object {
    char id[40];
    char *json; /* NULL: deleted */
};

static struct object *objects[KINDS];
static int count[KINDS];
static int major = 13, minor = 2;
static FILE *store;
static unsigned calls_left; /* what a test allows before it ends the process; 0: all */
static unsigned refuse_in;  /* the change that a test wants to be refused; 0: none */

/* ---- text */

static WCHAR *wide(const char *text) {
    size_t length = strlen(text) + 1;
    WCHAR *made = CoTaskMemAlloc(length * sizeof *made);
    for (size_t i = 0; i < length; i++) made[i] = (unsigned char)text[i];
    return made;
}

static char *narrow(const WCHAR *text) {
    size_t length = 0;
    while (text && text[length]) length++;
    char *made = calloc(length + 1, 1);
    for (size_t i = 0; i < length; i++) made[i] = (char)text[i];
    return made;
}

/* The text between a key and what ends its value; false if the key is not there. */
static int value(const char *json, const char *key, char end, char *out, size_t most) {
    const char *at = strstr(json, key);
    size_t n = 0;
    if (!at) return 0;
    for (at += strlen(key); *at && *at != end && n + 1 < most; at++) out[n++] = *at;
    out[n] = 0;
    return 1;
}

static void id_of(const GUID *guid, char *out) {
    const unsigned char *d = guid->Data4;
    sprintf(out, "%08lx-%04x-%04x-%02x%02x-%02x%02x%02x%02x%02x%02x", (unsigned long)guid->Data1, guid->Data2, guid->Data3,
            d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
}

/* ---- the store */

static int find(enum kind kind, const char *id) {
    for (int i = 0; i < count[kind]; i++)
        if (objects[kind][i].json && !_stricmp(objects[kind][i].id, id)) return i;
    return -1;
}

static int put(enum kind kind, const char *id, const char *json) {
    int i = find(kind, id);
    if (i < 0) i = count[kind]++;
    if (i >= MOST) abort();
    strcpy(objects[kind][i].id, id);
    free(objects[kind][i].json);
    objects[kind][i].json = strdup(json);
    return i;
}

static void drop(enum kind kind, int i) {
    free(objects[kind][i].json);
    objects[kind][i].json = NULL;
}

static void read_line(char *line) {
    char *rest = strchr(line, ' ');
    char id[40];
    if (!rest) return;
    *rest++ = 0;
    if (!strcmp(line, "version")) {
        sscanf(rest, "%d.%d", &major, &minor);
        return;
    }
    for (enum kind kind = 0; kind < KINDS; kind++) {
        size_t length = strlen(NAMES[kind]);
        if (!strcmp(line, NAMES[kind]) && value(rest, "\"ID\":\"", '"', id, sizeof id)) put(kind, id, rest);
        if (!strcmp(line, "delete") && !strncmp(rest, NAMES[kind], length) && rest[length] == ' ') {
            int i = find(kind, rest + length + 1);
            if (i >= 0) drop(kind, i);
        }
    }
}

static void load(void) {
    const char *name = getenv("HNS_STORE");
    char *line = malloc(LONGEST);
    FILE *file = name ? fopen(name, "r") : NULL;
    for (enum kind kind = 0; kind < KINDS; kind++) objects[kind] = calloc(MOST, sizeof *objects[kind]);
    while (file && fgets(line, LONGEST, file)) {
        line[strcspn(line, "\r\n")] = 0;
        read_line(line);
    }
    if (file) fclose(file);
    store = name ? fopen(name, "ab") : NULL;
    free(line);
    if (getenv("HNS_DIE_AFTER")) calls_left = (unsigned)atoi(getenv("HNS_DIE_AFTER"));
    if (getenv("HNS_REFUSE")) refuse_in = (unsigned)atoi(getenv("HNS_REFUSE"));
}

/* Stands before and after every change: a test that walks through all numbers has killed a run at each of them. */
static void may_die(void) {
    if (calls_left && --calls_left == 0) _Exit(137);
}

static int refused(void) { return refuse_in && --refuse_in == 0; }

static void note(const char *format, const char *first, const char *second) {
    if (!store) return;
    fprintf(store, format, first, second);
    fflush(store);
}

#ifdef _WIN32
BOOL WINAPI DllMain(HINSTANCE module, DWORD reason, LPVOID reserved) {
    (void)module, (void)reserved;
    if (reason == DLL_PROCESS_ATTACH) {
        InitializeCriticalSection(&lock);
        load();
    }
    return TRUE;
}
#else
__attribute__((constructor)) static void begin(void) { load(); }
#endif

/* ---- the calls; a handle is the place of an object, plus one */

/* A query may ask for objects with an ID, with a name, or of a network. */
static int matches(const char *query, const char *json) {
    static const char *const FIELDS[][2] = {{"ID", "ID"}, {"Name", "Name"}, {"VirtualNetwork", "HostComputeNetwork"}};
    char wanted[256], has[256], key[64];
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++) {
        sprintf(key, "\\\"%s\\\":\\\"", FIELDS[i][0]);
        if (!value(query, key, '\\', wanted, sizeof wanted)) continue;
        sprintf(key, "\"%s\":\"", FIELDS[i][1]);
        return value(json, key, '"', has, sizeof has) && !_stricmp(has, wanted);
    }
    return 1;
}

static HRESULT list(enum kind kind, const WCHAR *query, WCHAR **out) {
    char *asked = narrow(query);
    LOCK();
    char *answer = malloc(3 + 48 * (size_t)(count[kind] + 1));
    size_t length = (size_t)sprintf(answer, "[");
    for (int i = 0; i < count[kind]; i++)
        if (objects[kind][i].json && matches(asked, objects[kind][i].json))
            length += (size_t)sprintf(answer + length, "%s\"%s\"", length > 1 ? "," : "", objects[kind][i].id);
    strcpy(answer + length, "]");
    UNLOCK();
    *out = wide(answer);
    free(answer);
    free(asked);
    return 0;
}

static HRESULT open_object(enum kind kind, const GUID *guid, void **handle) {
    char id[40];
    id_of(guid, id);
    LOCK();
    int i = find(kind, id);
    UNLOCK();
    if (i < 0) return NOT_FOUND;
    *handle = (void *)(INT_PTR)(i + 1);
    return 0;
}

static HRESULT show(enum kind kind, void *handle, WCHAR **out) {
    LOCK();
    const char *json = objects[kind][(INT_PTR)handle - 1].json;
    *out = wide(json ? json : "{}");
    UNLOCK();
    return 0;
}

/* What a load balancer answers at. The flags of the whole stand outside of its list of mappings. */
static void frontend(const char *json, char *out) {
    char vips[512] = "", mapping[512] = "", protocol[16] = "", port[16] = "", *rest = strdup(json), *list;
    unsigned flags = 0;
    value(json, "\"FrontendVIPs\":[", ']', vips, sizeof vips);
    value(json, "\"PortMappings\":[{", '}', mapping, sizeof mapping);
    strcat(mapping, ",");
    value(mapping, "\"Protocol\":", ',', protocol, sizeof protocol);
    value(mapping, "\"ExternalPort\":", ',', port, sizeof port);
    list = strstr(rest, "\"PortMappings\":[{");
    if (list) memset(list, ' ', strcspn(list, "}"));
    list = strstr(rest, "\"Flags\":");
    if (list) flags = (unsigned)atoi(list + strlen("\"Flags\":"));
    sprintf(out, "%s %s %s %u", vips, protocol, port, flags & 2);
    free(rest);
}

static int frontend_is_taken(const WCHAR *settings) {
    char wanted[1100], has[1100], *given = narrow(settings);
    int taken = 0;
    frontend(given, wanted);
    for (int i = 0; i < count[LOADBALANCER] && !taken; i++) {
        if (!objects[LOADBALANCER][i].json) continue;
        frontend(objects[LOADBALANCER][i].json, has);
        taken = !strcmp(wanted, has);
    }
    free(given);
    return taken;
}

/* Keep a document under an ID, which goes into it. */
static int keep(enum kind kind, const char *id, const WCHAR *settings) {
    char *given = narrow(settings);
    char *json = malloc(strlen(given) + 64);
    sprintf(json, "{\"ID\":\"%s\"%s%s", id, given[1] == '}' ? "" : ",", given + 1);
    int i = put(kind, id, json);
    note("%s %s\n", NAMES[kind], json);
    free(json);
    free(given);
    return i;
}

/* A caller may choose the ID; kube-proxy leaves it to the service. */
static HRESULT create(enum kind kind, const GUID *wanted, const WCHAR *settings, void **handle) {
    static const GUID NONE;
    char id[40];
    HRESULT result = 0;
    LOCK();
    may_die();
    id_of(wanted, id);
    if (!memcmp(wanted, &NONE, sizeof NONE)) sprintf(id, "%08x-0000-4000-8000-%012x", kind, count[kind] + 1);
    if (refused())
        result = DENIED;
    else if (kind == LOADBALANCER && frontend_is_taken(settings))
        result = PORT_EXISTS;
    else
        *handle = (void *)(INT_PTR)(keep(kind, id, settings) + 1);
    may_die();
    UNLOCK();
    return result;
}

static HRESULT remove_object(enum kind kind, const GUID *guid) {
    char id[40];
    HRESULT result = 0;
    id_of(guid, id);
    LOCK();
    int i = find(kind, id);
    if (i < 0) {
        result = NOT_FOUND;
    } else {
        may_die();
        if (refused()) {
            result = DENIED;
        } else {
            drop(kind, i);
            note("delete %s %s\n", NAMES[kind], id);
        }
        may_die();
    }
    UNLOCK();
    return result;
}

static HRESULT modify(void *handle, const WCHAR *settings) {
    char id[40];
    HRESULT result = 0;
    LOCK();
    may_die();
    strcpy(id, objects[LOADBALANCER][(INT_PTR)handle - 1].id);
    if (refused())
        result = DENIED;
    else
        keep(LOADBALANCER, id, settings);
    may_die();
    UNLOCK();
    return result;
}

EXPORT HcnEnumerateNetworks(const WCHAR *query, WCHAR **out, WCHAR **error) { (void)error; return list(NETWORK, query, out); }
EXPORT HcnOpenNetwork(const GUID *id, void **handle, WCHAR **error) { (void)error; return open_object(NETWORK, id, handle); }
EXPORT HcnQueryNetworkProperties(void *handle, const WCHAR *query, WCHAR **out, WCHAR **error) {
    (void)query, (void)error;
    return show(NETWORK, handle, out);
}
EXPORT HcnCloseNetwork(void *handle) { (void)handle; return 0; }

EXPORT HcnEnumerateEndpoints(const WCHAR *query, WCHAR **out, WCHAR **error) { (void)error; return list(ENDPOINT, query, out); }
EXPORT HcnOpenEndpoint(const GUID *id, void **handle, WCHAR **error) { (void)error; return open_object(ENDPOINT, id, handle); }
EXPORT HcnQueryEndpointProperties(void *handle, const WCHAR *query, WCHAR **out, WCHAR **error) {
    (void)query, (void)error;
    return show(ENDPOINT, handle, out);
}
EXPORT HcnCloseEndpoint(void *handle) { (void)handle; return 0; }
EXPORT HcnCreateEndpoint(void *network, const GUID *id, const WCHAR *settings, void **handle, WCHAR **error) {
    (void)network, (void)error;
    return create(ENDPOINT, id, settings, handle);
}
EXPORT HcnDeleteEndpoint(const GUID *id, WCHAR **error) { (void)error; return remove_object(ENDPOINT, id); }

EXPORT HcnEnumerateLoadBalancers(const WCHAR *query, WCHAR **out, WCHAR **error) {
    (void)error;
    return list(LOADBALANCER, query, out);
}
EXPORT HcnOpenLoadBalancer(const GUID *id, void **handle, WCHAR **error) { (void)error; return open_object(LOADBALANCER, id, handle); }
EXPORT HcnQueryLoadBalancerProperties(void *handle, const WCHAR *query, WCHAR **out, WCHAR **error) {
    (void)query, (void)error;
    return show(LOADBALANCER, handle, out);
}
EXPORT HcnCloseLoadBalancer(void *handle) { (void)handle; return 0; }
EXPORT HcnCreateLoadBalancer(const GUID *id, const WCHAR *settings, void **handle, WCHAR **error) {
    (void)error;
    return create(LOADBALANCER, id, settings, handle);
}
EXPORT HcnModifyLoadBalancer(void *handle, const WCHAR *settings, WCHAR **error) {
    (void)error;
    return modify(handle, settings);
}
EXPORT HcnDeleteLoadBalancer(const GUID *id, WCHAR **error) { (void)error; return remove_object(LOADBALANCER, id); }

EXPORT HNSCall(const WCHAR *method, const WCHAR *path, const WCHAR *body, WCHAR **out) {
    char answer[128], *asked = narrow(path);
    (void)method, (void)body;
    if (strstr(asked, "globals/version"))
        sprintf(answer, "{\"Success\":true,\"Output\":{\"Major\":%d,\"Minor\":%d}}", major, minor);
    else
        sprintf(answer, "{\"Success\":true,\"Output\":[]}");
    *out = wide(answer);
    free(asked);
    return 0;
}
