// Copyright (c) the agentless.kube_proxy authors
// Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
//
// akp-node for Windows: make the Host Networking Service (HNS) of this node equal to a bundle. A PREVIEW, never run on Windows.
//
// A bundle has a manifest with digests, and hns.json: documents of endpoints and load balancers, endpoints named by address.
// This program gives each its GUID, compares with what HNS has, and creates, modifies or deletes the difference through
// computenetwork.dll, as kube-proxy does. It decides nothing about Services.
//
// HNS has no field for an owner. So the record, made.json in the state directory, holds the GUID of every object that this program
// makes. A run chooses all GUIDs and writes them down BEFORE it asks for the first object: whatever kills a run, the next one knows
// what is its own. What is not in the record is never deleted or changed.
//
// C# 5, compiled by the .NET Framework of the node when it is started; see akp-node.ps1.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Net.NetworkInformation;
using System.Runtime.InteropServices;
using System.Security.AccessControl;
using System.Security.Cryptography;
using System.Security.Principal;
using System.Text;
using System.Threading;
using System.Web.Script.Serialization;

using Document = System.Collections.Generic.Dictionary<string, object>;

// Ends a run: 2 bad bundle or usage, 3 something is missing or the state directory is not safe, 4 HNS refused, 5 another run has the lock.
class Refused : Exception
{
    public readonly int Code;
    public Refused(int code, string message) : base(message) { Code = code; }
}

// The documented calls of computenetwork.dll that are needed, with their errors as exceptions.
static class Hcn
{
    const string Dll = "computenetwork.dll";
    const string Query = "{\"SchemaVersion\":{\"Major\":2,\"Minor\":0}}";
    const int NotFound = unchecked((int)0x80070490);

    [DllImport(Dll)] static extern int HcnEnumerateNetworks([MarshalAs(UnmanagedType.LPWStr)] string query, [MarshalAs(UnmanagedType.LPWStr)] out string found, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnOpenNetwork(ref Guid id, out IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnQueryNetworkProperties(IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] string query, [MarshalAs(UnmanagedType.LPWStr)] out string found, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnCloseNetwork(IntPtr handle);
    [DllImport(Dll)] static extern int HcnEnumerateEndpoints([MarshalAs(UnmanagedType.LPWStr)] string query, [MarshalAs(UnmanagedType.LPWStr)] out string found, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnOpenEndpoint(ref Guid id, out IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnQueryEndpointProperties(IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] string query, [MarshalAs(UnmanagedType.LPWStr)] out string found, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnCloseEndpoint(IntPtr handle);
    [DllImport(Dll)] static extern int HcnCreateEndpoint(IntPtr network, ref Guid id, [MarshalAs(UnmanagedType.LPWStr)] string settings, out IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnDeleteEndpoint(ref Guid id, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnEnumerateLoadBalancers([MarshalAs(UnmanagedType.LPWStr)] string query, [MarshalAs(UnmanagedType.LPWStr)] out string found, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnOpenLoadBalancer(ref Guid id, out IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnQueryLoadBalancerProperties(IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] string query, [MarshalAs(UnmanagedType.LPWStr)] out string found, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnCloseLoadBalancer(IntPtr handle);
    [DllImport(Dll)] static extern int HcnCreateLoadBalancer(ref Guid id, [MarshalAs(UnmanagedType.LPWStr)] string settings, out IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnModifyLoadBalancer(IntPtr handle, [MarshalAs(UnmanagedType.LPWStr)] string settings, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport(Dll)] static extern int HcnDeleteLoadBalancer(ref Guid id, [MarshalAs(UnmanagedType.LPWStr)] out string error);
    [DllImport("vmcompute.dll")] static extern int HNSCall([MarshalAs(UnmanagedType.LPWStr)] string method, [MarshalAs(UnmanagedType.LPWStr)] string path, [MarshalAs(UnmanagedType.LPWStr)] string body, [MarshalAs(UnmanagedType.LPWStr)] out string answer);

    delegate int Lists(string query, out string found, out string error);
    delegate int Opens(ref Guid id, out IntPtr handle, out string error);
    delegate int Shows(IntPtr handle, string query, out string found, out string error);
    delegate int Closes(IntPtr handle);

    static void Check(int result, string call, string error)
    {
        if (result != 0) throw new Refused(4, string.Format("{0}: 0x{1:x8} {2}", call, result, error).Trim());
    }

    // Every object of a kind, by GUID. One that goes while the list is read is left out.
    static Dictionary<string, Document> All(string kind, Lists list, Opens open, Shows show, Closes close)
    {
        string found, error;
        Check(list(Query, out found, out error), "HcnEnumerate" + kind + "s", error);
        var all = new Dictionary<string, Document>(StringComparer.OrdinalIgnoreCase);
        foreach (var id in Json.List(found))
        {
            IntPtr handle;
            var guid = new Guid((string)id);
            int opened = open(ref guid, out handle, out error);
            if (opened == NotFound) continue;
            Check(opened, "HcnOpen" + kind, error);
            int shown = show(handle, Query, out found, out error);
            close(handle);
            Check(shown, "HcnQuery" + kind, error);
            all[guid.ToString()] = Json.Object(found);
        }
        return all;
    }

    public static Dictionary<string, Document> Networks() { return All("Network", HcnEnumerateNetworks, HcnOpenNetwork, HcnQueryNetworkProperties, HcnCloseNetwork); }
    public static Dictionary<string, Document> Endpoints() { return All("Endpoint", HcnEnumerateEndpoints, HcnOpenEndpoint, HcnQueryEndpointProperties, HcnCloseEndpoint); }
    public static Dictionary<string, Document> LoadBalancers() { return All("LoadBalancer", HcnEnumerateLoadBalancers, HcnOpenLoadBalancer, HcnQueryLoadBalancerProperties, HcnCloseLoadBalancer); }

    public static void CreateEndpoint(string network, string id, Document document)
    {
        IntPtr on, handle;
        string error;
        Guid where = new Guid(network), guid = new Guid(id);
        Check(HcnOpenNetwork(ref where, out on, out error), "HcnOpenNetwork", error);
        int result = HcnCreateEndpoint(on, ref guid, Json.Text(document), out handle, out error);
        HcnCloseNetwork(on);
        Check(result, "HcnCreateEndpoint", error);
        HcnCloseEndpoint(handle);
    }

    public static void CreateLoadBalancer(string id, Document document)
    {
        IntPtr handle;
        string error;
        var guid = new Guid(id);
        Check(HcnCreateLoadBalancer(ref guid, Json.Text(document), out handle, out error), "HcnCreateLoadBalancer", error);
        HcnCloseLoadBalancer(handle);
    }

    public static void ModifyLoadBalancer(string id, Document document)
    {
        IntPtr handle;
        string error;
        var guid = new Guid(id);
        Check(HcnOpenLoadBalancer(ref guid, out handle, out error), "HcnOpenLoadBalancer", error);
        int result = HcnModifyLoadBalancer(handle, Json.Text(document), out error);
        HcnCloseLoadBalancer(handle);
        Check(result, "HcnModifyLoadBalancer", error);
    }

    // Deleting what is gone already is no failure. Windows Server 2019 may refuse the first attempt and grant the second.
    public static void Delete(bool endpoint, string id)
    {
        string error = "";
        var guid = new Guid(id);
        int result = -1;
        for (int attempt = 0; attempt < 2 && result != 0 && result != NotFound; attempt++)
            result = endpoint ? HcnDeleteEndpoint(ref guid, out error) : HcnDeleteLoadBalancer(ref guid, out error);
        if (result != NotFound) Check(result, endpoint ? "HcnDeleteEndpoint" : "HcnDeleteLoadBalancer", error);
    }

    public static Version Version()
    {
        string answer;
        Check(HNSCall("GET", "/globals/version", "", out answer), "HNSCall GET /globals/version", answer);
        var told = (Document)Json.Object(answer)["Output"];
        return new Version(Json.Number(told, "Major"), Json.Number(told, "Minor"));
    }
}

static class Json
{
    static JavaScriptSerializer Serializer() { return new JavaScriptSerializer { MaxJsonLength = 256 * 1024 * 1024, RecursionLimit = 20 }; }
    public static string Text(object value) { return Serializer().Serialize(value); }
    public static Document Object(string text) { return Serializer().Deserialize<Document>(text); }
    public static List<object> List(string text) { return Serializer().Deserialize<List<object>>(text); }
    public static IEnumerable<object> Items(Document document, string key)
    {
        object found;
        return document.TryGetValue(key, out found) ? ((System.Collections.IEnumerable)found).Cast<object>() : new object[0];
    }
    public static int Number(Document document, string key)
    {
        object found;
        return document.TryGetValue(key, out found) ? Convert.ToInt32(found) : 0;
    }
}

// The state directory holds the program that SYSTEM starts at boot. Users may create files and directories below %ProgramData%, and own
// what they create. So SYSTEM and Administrators alone have rights here, from the moment the directory exists.
public static class StateDirectory
{
    static readonly SecurityIdentifier Administrators = new SecurityIdentifier(WellKnownSidType.BuiltinAdministratorsSid, null);
    static readonly IdentityReference[] Trusted = { new SecurityIdentifier(WellKnownSidType.LocalSystemSid, null), Administrators };

    // Creates the directory, or refuses one that others own, may write or may read. akp-boot.ps1 calls it, too.
    public static void Secure(string directory)
    {
        if (Environment.OSVersion.Platform != PlatformID.Win32NT) // mono, in tests: there are no such rights
        {
            Directory.CreateDirectory(directory);
            return;
        }
        Directory.CreateDirectory(directory, Closed()); // one that exists stays as it is
        var link = (File.GetAttributes(directory) & FileAttributes.ReparsePoint) != 0;
        var objection = link ? "it is a link" : Objection(Directory.GetAccessControl(directory, AccessControlSections.Owner | AccessControlSections.Access));
        if (objection != null) throw new Refused(3, directory + ": " + objection + "; SYSTEM starts a program from there, so it must be out of reach of all but SYSTEM and Administrators. Look at what it holds, then remove it");
    }

    public static DirectorySecurity Closed()
    {
        var security = new DirectorySecurity();
        security.SetOwner(Administrators);
        security.SetAccessRuleProtection(true, false);
        foreach (var each in Trusted)
            security.AddAccessRule(new FileSystemAccessRule(each, FileSystemRights.FullControl, InheritanceFlags.ContainerInherit | InheritanceFlags.ObjectInherit, PropagationFlags.None, AccessControlType.Allow));
        return security;
    }

    // Why a directory with this owner and these rights is not safe; null if it is.
    public static string Objection(DirectorySecurity has)
    {
        var owner = has.GetOwner(typeof(SecurityIdentifier));
        if (!Trusted.Contains(owner)) return "it belongs to " + owner;
        if (!has.AreAccessRulesProtected) return "it inherits rights from the directory above";
        var other = has.GetAccessRules(true, true, typeof(SecurityIdentifier)).Cast<FileSystemAccessRule>()
            .FirstOrDefault(each => each.AccessControlType == AccessControlType.Allow && !Trusted.Contains(each.IdentityReference));
        return other == null ? null : other.IdentityReference + " has rights there";
    }
}

// made.json: the generation that was applied last, and the GUIDs of all objects that this program has made or was about to make.
class Record
{
    readonly string file;
    public string Generation = "";
    public readonly HashSet<string> Endpoints = new HashSet<string>(StringComparer.OrdinalIgnoreCase);
    public readonly HashSet<string> LoadBalancers = new HashSet<string>(StringComparer.OrdinalIgnoreCase);

    public Record(string directory)
    {
        file = Path.Combine(directory, "made.json");
        if (!File.Exists(file)) return;
        var told = Json.Object(File.ReadAllText(file));
        Generation = (string)told["generation"];
        Endpoints.UnionWith(Json.Items(told, "endpoints").Cast<string>());
        LoadBalancers.UnionWith(Json.Items(told, "loadBalancers").Cast<string>());
    }

    // Replaced in one step, so that a run that is killed leaves the old record or the new one.
    public void Write()
    {
        var told = new Document { { "generation", Generation }, { "endpoints", Endpoints.ToArray() }, { "loadBalancers", LoadBalancers.ToArray() } };
        Files.Replace(file, Json.Text(told));
    }
}

static class Files
{
    public static void Replace(string file, string text)
    {
        var fresh = file + ".new";
        using (var stream = new FileStream(fresh, FileMode.Create, FileAccess.Write))
        {
            var bytes = Encoding.UTF8.GetBytes(text);
            stream.Write(bytes, 0, bytes.Length);
            stream.Flush(true);
        }
        if (File.Exists(file)) File.Replace(fresh, file, null);
        else File.Move(fresh, file);
    }
}

// A bundle whose files are those that its manifest names.
class Bundle
{
    public readonly string Directory, Generation, Network;
    public readonly List<Document> Endpoints, LoadBalancers;

    public Bundle(string directory)
    {
        Directory = directory;
        var file = Path.Combine(directory, "manifest.json");
        if (!File.Exists(file)) throw new Refused(2, directory + ": no bundle: it has no manifest.json");
        var manifest = Json.Object(File.ReadAllText(file));
        if ((string)manifest["kind"] != "Bundle" || (string)manifest["mode"] != "kernelspace")
            throw new Refused(2, directory + ": not a whole bundle of kernelspace mode");
        Generation = (string)manifest["generation"];
        foreach (var each in (Document)manifest["files"]) CheckDigest(each.Key, (string)each.Value);
        var hns = Json.Object(File.ReadAllText(Path.Combine(directory, "hns.json")));
        Network = (string)((Document)hns["network"])["Name"];
        Endpoints = Json.Items(hns, "endpoints").Cast<Document>().ToList();
        LoadBalancers = Json.Items(hns, "loadBalancers").Cast<Document>().ToList();
    }

    void CheckDigest(string name, string wanted)
    {
        if (name != Path.GetFileName(name)) throw new Refused(2, "manifest.json: " + name + ": not a plain name");
        var bytes = File.ReadAllBytes(Path.Combine(Directory, name));
        using (var sha = SHA256.Create())
        {
            var has = BitConverter.ToString(sha.ComputeHash(bytes)).Replace("-", "").ToLowerInvariant() + " " + bytes.Length;
            if (has != wanted) throw new Refused(2, name + ": not what manifest.json says: " + has);
        }
    }
}

// What HNS has, what a bundle wants, and the steps from one to the other. Nothing is changed before Run.
class Host
{
    static readonly Version Modifies = new Version(15, 5); // older services take a new list of endpoints and ignore it

    readonly Record record;
    readonly List<Action> steps = new List<Action>();
    public int Created, Modified, Deleted, Kept, Foreign;
    public readonly SortedSet<string> Missing = new SortedSet<string>(StringComparer.Ordinal); // pods here that the CNI plugin has not made, or has removed

    public Host(Record record) { this.record = record; }

    public int Changes { get { return Created + Modified + Deleted; } }

    // First what is new, then what is stale: HNS has no transaction, and a Service that did not change never notices.
    public void Plan(Bundle bundle)
    {
        var network = Networks.Find(bundle.Network).Key;
        var addresses = PlanEndpoints(network, bundle);
        PlanLoadBalancers(bundle, addresses);
        var wanted = new HashSet<string>(bundle.Endpoints.Select(Networks.AddressOf));
        foreach (var each in addresses.Where(each => !wanted.Contains(each.Key) && record.Endpoints.Contains(each.Value)).ToList())
            Delete(true, each.Value);
    }

    public void PlanNothing()
    {
        foreach (var id in Hcn.LoadBalancers().Keys.Where(record.LoadBalancers.Contains).ToList()) Delete(false, id);
        foreach (var id in Hcn.Endpoints().Keys.Where(record.Endpoints.Contains).ToList()) Delete(true, id);
    }

    // The record first: it has the GUIDs of all that the steps make. What is gone leaves it only once it is gone.
    public void Run(string generation)
    {
        if (steps.Count > 0) record.Write();
        foreach (var step in steps) step();
        record.LoadBalancers.IntersectWith(Hcn.LoadBalancers().Keys);
        record.Endpoints.IntersectWith(Hcn.Endpoints().Keys);
        record.Generation = generation;
        record.Write();
    }

    // Address -> GUID of every endpoint that the network has or will have. A pod of this node goes before a remote endpoint of the same address.
    Dictionary<string, string> PlanEndpoints(string network, Bundle bundle)
    {
        var found = new Dictionary<string, string>();
        foreach (var each in Networks.EndpointsOf(network).OrderBy(each => Networks.IsRemote(each.Value)))
            foreach (var address in Networks.AddressesOf(each.Value))
                if (!found.ContainsKey(address)) found[address] = each.Key;
        foreach (var document in bundle.Endpoints)
        {
            var address = Networks.AddressOf(document);
            if (found.ContainsKey(address)) continue;
            var settings = new Document(document) { { "HostComputeNetwork", network } };
            found[address] = Create(record.Endpoints, id => Hcn.CreateEndpoint(network, id, settings));
        }
        return found;
    }

    void PlanLoadBalancers(Bundle bundle, Dictionary<string, string> addresses)
    {
        var all = Hcn.LoadBalancers().Where(each => Json.Items(each.Value, "PortMappings").Any()).ToDictionary(each => each.Key, each => each.Value);
        var stale = new Dictionary<string, string>(); // what HNS has -> its GUID
        foreach (var each in all)
        {
            var text = Sorted(each.Value);
            if (!stale.ContainsKey(text) || record.LoadBalancers.Contains(each.Key)) stale[text] = each.Key;
        }
        var missing = new List<Document>();
        foreach (var each in bundle.LoadBalancers)
        {
            var ids = Known(addresses, Json.Items(each, "HostComputeEndpoints").Cast<string>());
            if (ids.Length == 0) continue;
            var document = new Document(each);
            document["HostComputeEndpoints"] = ids;
            if (stale.Remove(Sorted(document))) Kept++;
            else missing.Add(document);
        }
        var own = stale.Values.Where(record.LoadBalancers.Contains).ToLookup(id => Frontend(all[id]));
        var taken = new HashSet<string>();
        foreach (var document in missing)
        {
            var old = own[Frontend(document)].FirstOrDefault();
            if (old != null) taken.Add(old);
            Succeed(old, old == null ? null : all[old], document);
        }
        foreach (var id in own.SelectMany(each => each).Where(id => !taken.Contains(id))) Delete(false, id);
        Foreign = stale.Count(each => !record.LoadBalancers.Contains(each.Value));
    }

    // Two load balancers cannot have one frontend: one whose endpoints change is modified where HNS can do that; otherwise it goes just before its successor comes.
    void Succeed(string old, Document has, Document document)
    {
        if (old != null && WithoutEndpoints(has) == WithoutEndpoints(document) && Hcn.Version() >= Modifies)
        {
            Modified++;
            steps.Add(() => Hcn.ModifyLoadBalancer(old, document));
            return;
        }
        if (old != null) Delete(false, old);
        Create(record.LoadBalancers, id => Hcn.CreateLoadBalancer(id, document));
    }

    // One pod that is not there keeps no Service from its others.
    string[] Known(Dictionary<string, string> addresses, IEnumerable<string> wanted)
    {
        var all = wanted.ToList();
        Missing.UnionWith(all.Where(address => !addresses.ContainsKey(address)));
        return all.Where(addresses.ContainsKey).Select(address => addresses[address]).ToArray();
    }

    // A document as a text that is the same for equal ones, whatever HNS adds to what it was given: fields that are missing are zero or empty.
    static string Sorted(Document document)
    {
        var ids = Json.Items(document, "HostComputeEndpoints").Cast<string>().Select(id => id.ToLowerInvariant()).OrderBy(id => id, StringComparer.Ordinal);
        return WithoutEndpoints(document) + " " + string.Join(",", ids.ToArray());
    }

    static string WithoutEndpoints(Document document)
    {
        var mapping = (Document)Json.Items(document, "PortMappings").First();
        object source;
        document.TryGetValue("SourceVIP", out source);
        var rest = new object[] { Json.Number(document, "Flags"), Json.Number(mapping, "InternalPort"), Json.Number(mapping, "DistributionType"), Json.Number(mapping, "Flags"), source };
        return Frontend(document) + " " + string.Join(" ", rest);
    }

    static string Frontend(Document document)
    {
        var mapping = (Document)Json.Items(document, "PortMappings").First();
        var vip = string.Join(",", Json.Items(document, "FrontendVIPs").Cast<string>().ToArray());
        return string.Join(" ", new object[] { vip, Json.Number(mapping, "Protocol"), Json.Number(mapping, "ExternalPort"), Json.Number(document, "Flags") & 2 });
    }

    string Create(HashSet<string> own, Action<string> create)
    {
        var id = Guid.NewGuid().ToString();
        Created++;
        own.Add(id);
        steps.Add(() => create(id));
        return id;
    }

    void Delete(bool endpoint, string id)
    {
        Deleted++;
        steps.Add(() => Hcn.Delete(endpoint, id));
    }
}

// Networks of HNS and their endpoints, as documents tell.
static class Networks
{
    public static bool Exists(string name) { return Hcn.Networks().Values.Any(each => (string)each["Name"] == name); }

    public static KeyValuePair<string, Document> Find(string name)
    {
        var found = Hcn.Networks().Where(each => (string)each.Value["Name"] == name).ToList();
        if (found.Count == 0) throw new Refused(3, "HNS has no network " + name + "; is the CNI plugin running?");
        return found[0];
    }

    // The network of that name, or the only one that pods can be on. "*" is for callers who name a root endpoint and no network.
    public static KeyValuePair<string, Document> OfPods(string name)
    {
        if (!string.IsNullOrEmpty(name) && name != "*") return Find(name);
        var types = new[] { "L2Bridge", "Overlay" };
        var found = Hcn.Networks().Where(each => types.Contains((string)each.Value["Type"], StringComparer.OrdinalIgnoreCase)).ToList();
        if (found.Count == 1) return found[0];
        var names = string.Join(", ", found.Select(each => (string)each.Value["Name"]).ToArray());
        throw new Refused(3, found.Count == 0 ? "HNS has no network of pods; is the CNI plugin running?" : "say which network is that of the pods: facts NETWORK, one of " + names);
    }

    public static IEnumerable<KeyValuePair<string, Document>> EndpointsOf(string network)
    {
        return Hcn.Endpoints().Where(each =>
        {
            object on;
            return each.Value.TryGetValue("HostComputeNetwork", out on) && string.Equals((string)on, network, StringComparison.OrdinalIgnoreCase);
        });
    }

    public static bool IsRemote(Document endpoint) { return (Json.Number(endpoint, "Flags") & 1) != 0; }

    public static IEnumerable<string> AddressesOf(Document endpoint)
    {
        return Json.Items(endpoint, "IpConfigurations").Cast<Document>().Select(each => (string)each["IpAddress"]);
    }

    public static string AddressOf(Document endpoint) { return AddressesOf(endpoint).First(); }
}

// What `akp render --facts` reads of a Windows node.
static class Facts
{
    public static void Tell(Document answer, string name, string root, Record record)
    {
        var network = Networks.OfPods(name);
        // What this program made is no pod of the CNI plugin.
        var others = Networks.EndpointsOf(network.Key).Where(each => !Networks.IsRemote(each.Value) && !record.Endpoints.Contains(each.Key)).Select(each => each.Value).ToList();
        var hns = new Document
        {
            { "version", Hcn.Version().ToString() },
            { "networkType", network.Value["Type"] },
            { "remoteSubnets", Json.Items(network.Value, "Policies").Cast<Document>().Where(each => (string)each["Type"] == "RemoteSubnetRoute").Select(Route).ToArray() },
            { "endpoints", others.SelectMany(Networks.AddressesOf).OrderBy(each => each, StringComparer.Ordinal).ToArray() },
        };
        var gateway = Hcn.Endpoints().Values.FirstOrDefault(each => each.ContainsKey("Name") && (string)each["Name"] == root);
        if (gateway != null) hns["rootEndpoint"] = Networks.AddressOf(gateway);
        answer["hns"] = hns;
        answer["network"] = network.Value["Name"];
        answer["addresses"] = NetworkInterface.GetAllNetworkInterfaces().SelectMany(Addresses).ToArray();
    }

    static Document Route(Document policy)
    {
        var settings = (Document)policy["Settings"];
        return new Document { { "destinationPrefix", settings["DestinationPrefix"] }, { "providerAddress", settings["ProviderAddress"] } };
    }

    static IEnumerable<Document> Addresses(NetworkInterface device)
    {
        var mac = string.Join(":", device.GetPhysicalAddress().GetAddressBytes().Select(each => each.ToString("x2")).ToArray());
        foreach (var each in device.GetIPProperties().UnicastAddresses)
            yield return new Document { { "address", each.Address.ToString().Split('%')[0] }, { "interface", device.Name }, { "mac", mac } };
    }
}

public static class AkpNode
{
    const string Usage = "akp-node apply|check DIRECTORY | status | facts [NETWORK [ROOT-ENDPOINT]] | rollback | restore [SECONDS] | cleanup";
    const int Keep = 3; // bundles that rollback can reach

    static string state;

    public static int Main(string[] words)
    {
        var answer = new Document { { "verb", words.FirstOrDefault() ?? "" } };
        int code = 0;
        try
        {
            state = Environment.GetEnvironmentVariable("AKP_STATE") ?? Path.Combine(Environment.GetFolderPath(Environment.SpecialFolder.CommonApplicationData), "akp");
            StateDirectory.Secure(state);
            using (Lock()) Run(words, answer);
        }
        catch (Refused error) { code = error.Code; answer["error"] = error.Message; }
        catch (Exception error) { code = 3; answer["error"] = error.GetType().Name + ": " + error.Message; }
        answer["ok"] = code == 0;
        answer["code"] = code;
        Console.WriteLine(Json.Text(answer));
        return code;
    }

    static FileStream Lock()
    {
        try { return new FileStream(Path.Combine(state, "lock"), FileMode.OpenOrCreate, FileAccess.ReadWrite, FileShare.None); }
        catch (IOException) { throw new Refused(5, "another run is under way"); }
    }

    static void Run(string[] words, Document answer)
    {
        var record = new Record(state);
        var verb = words.FirstOrDefault() ?? "";
        bool takesDirectory = verb == "apply" || verb == "check";
        int most = verb == "facts" ? 3 : takesDirectory || verb == "restore" ? 2 : 1;
        if (words.Length < (takesDirectory ? 2 : 1) || words.Length > most) throw new Refused(2, "usage: " + Usage);
        switch (verb)
        {
            case "apply": Apply(new Bundle(words[1]), record, answer, true); break;
            case "check": Tell(answer, Planned(new Bundle(words[1]), record), record.Generation); break;
            case "restore": Restore(words.ElementAtOrDefault(1) ?? "0", record, answer); break;
            case "rollback": Rollback(record, answer); break;
            case "status": Status(record, answer); break;
            case "facts": Facts.Tell(answer, words.ElementAtOrDefault(1), words.ElementAtOrDefault(2) ?? "cbr0", record); break;
            case "cleanup": Cleanup(record, answer); break;
            default: throw new Refused(2, "usage: " + Usage);
        }
    }

    static Host Planned(Bundle bundle, Record record)
    {
        var host = new Host(record);
        host.Plan(bundle);
        return host;
    }

    static void Tell(Document answer, Host host, string generation)
    {
        answer["generation"] = generation;
        answer["changed"] = host.Changes > 0;
        answer["created"] = host.Created;
        answer["modified"] = host.Modified;
        answer["deleted"] = host.Deleted;
        answer["kept"] = host.Kept;
        answer["foreign"] = host.Foreign;
        answer["missing"] = host.Missing.ToArray();
    }

    static void Cleanup(Record record, Document answer)
    {
        var host = new Host(record);
        host.PlanNothing();
        // A restore that comes after a kill must find nothing to bring back.
        foreach (var each in Kept()) Directory.Delete(each, true);
        host.Run("");
        Tell(answer, host, "");
    }

    // The bundle is kept before HNS is asked, so that restore after a kill goes on with it.
    static void Apply(Bundle bundle, Record record, Document answer, bool keep)
    {
        var host = Planned(bundle, record);
        if (keep) Keeping(bundle);
        host.Run(bundle.Generation);
        Tell(answer, host, bundle.Generation);
    }

    // Directories of kept bundles, the newest last: their names begin with a number that grows.
    static List<string> Kept()
    {
        return Directory.GetDirectories(state, "bundle-*").Where(each => !each.EndsWith(".new")).OrderBy(each => each, StringComparer.Ordinal).ToList();
    }

    static void Keeping(Bundle bundle)
    {
        // What starts at boot finds the program in one place, whatever bundle is the last. It comes first: no kept bundle lacks it,
        // and a newer program comes with a bundle of the same generation, too.
        foreach (var name in new[] { "akp-node.cs", "akp-node.ps1" }) Files.Replace(Path.Combine(state, name), File.ReadAllText(Path.Combine(bundle.Directory, name)));
        var kept = Kept();
        var last = kept.LastOrDefault();
        if (last != null && last.EndsWith("-" + bundle.Generation)) return;
        int number = last == null ? 1 : int.Parse(Path.GetFileName(last).Split('-')[1]) + 1;
        var target = Path.Combine(state, string.Format("bundle-{0:d9}-{1}", number, bundle.Generation));
        if (Directory.Exists(target + ".new")) Directory.Delete(target + ".new", true);
        Directory.CreateDirectory(target + ".new");
        foreach (var file in Directory.GetFiles(bundle.Directory)) File.Copy(file, Path.Combine(target + ".new", Path.GetFileName(file)));
        Directory.Move(target + ".new", target);
        foreach (var old in kept.Take(Math.Max(0, kept.Count + 1 - Keep))) Directory.Delete(old, true);
    }

    // After a boot the CNI plugin may take a while until its network is there.
    static void Restore(string seconds, Record record, Document answer)
    {
        var last = Kept().LastOrDefault();
        if (last == null) throw new Refused(2, "there is no bundle to restore");
        var bundle = new Bundle(last);
        int limit;
        if (!int.TryParse(seconds, out limit)) throw new Refused(2, "usage: " + Usage);
        for (var waited = Stopwatch.StartNew(); waited.Elapsed.TotalSeconds < limit && !Networks.Exists(bundle.Network);) Thread.Sleep(200);
        Apply(bundle, record, answer, false);
    }

    static void Rollback(Record record, Document answer)
    {
        var kept = Kept();
        if (kept.Count < 2) throw new Refused(2, "there is no bundle to go back to");
        Apply(new Bundle(kept[kept.Count - 2]), record, answer, false);
        Directory.Delete(kept[kept.Count - 1], true);
    }

    static void Status(Record record, Document answer)
    {
        var last = Kept().LastOrDefault();
        answer["generation"] = record.Generation;
        if (last == null)
        {
            answer["state"] = "none";
            return;
        }
        var host = Planned(new Bundle(last), record);
        answer["state"] = host.Changes == 0 ? "applied" : "differs";
        answer["drift"] = host.Changes;
    }
}
