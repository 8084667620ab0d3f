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
// makes. It chooses the GUID and writes it down BEFORE it asks for the object: whatever kills a run, the next one knows what is its
// own. What is not in the record is never deleted or changed.
//
// C# 5, compiled by the .NET Framework of the node when it is started; see akp-node.ps1.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Security.Cryptography;
using System.Text;
using System.Web.Script.Serialization;

using Document = System.Collections.Generic.Dictionary<string, object>;

// Ends a run: 2 bad bundle or usage, 3 something is missing, 4 HNS refused, 5 another run has the lock.
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
    [DllImport(Dll)] static extern int HcnDeleteLoadBalancer(ref Guid id, [MarshalAs(UnmanagedType.LPWStr)] out string error);

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

    // Deleting what is gone already is no failure.
    public static void Delete(bool endpoint, string id)
    {
        string error;
        var guid = new Guid(id);
        int result = endpoint ? HcnDeleteEndpoint(ref guid, out error) : HcnDeleteLoadBalancer(ref guid, out error);
        if (result != NotFound) Check(result, endpoint ? "HcnDeleteEndpoint" : "HcnDeleteLoadBalancer", error);
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

// What HNS has, what a bundle wants, and the steps from one to the other.
class Host
{
    readonly Record record;
    readonly bool dryRun;
    public int Created, Deleted, Kept, Foreign;

    public Host(Record record, bool dryRun) { this.record = record; this.dryRun = dryRun; }

    // First what is new, then what is stale: HNS has no transaction, and a Service that did not change never notices.
    public void Become(Bundle bundle)
    {
        var network = Hcn.Networks().Where(each => (string)each.Value["Name"] == bundle.Network).Select(each => each.Key).FirstOrDefault();
        if (network == null) throw new Refused(3, "HNS has no network " + bundle.Network + "; is the CNI plugin running?");
        var addresses = MakeEndpoints(network, bundle);
        BalanceLoad(bundle, addresses);
        var wanted = new HashSet<string>(bundle.Endpoints.Select(AddressOf));
        foreach (var each in addresses.Where(each => !wanted.Contains(each.Key) && record.Endpoints.Contains(each.Value)).ToList())
            Delete(true, each.Value);
        Forget();
        record.Generation = bundle.Generation;
        if (!dryRun) record.Write();
    }

    public void Clean()
    {
        foreach (var id in Hcn.LoadBalancers().Keys.Where(record.LoadBalancers.Contains).ToList()) Delete(false, id);
        foreach (var id in Hcn.Endpoints().Keys.Where(record.Endpoints.Contains).ToList()) Delete(true, id);
        record.Generation = "";
        Forget();
        if (!dryRun) record.Write();
    }

    // Address -> GUID of every endpoint of the network. A pod of this node goes before a remote endpoint of the same address.
    Dictionary<string, string> MakeEndpoints(string network, Bundle bundle)
    {
        var found = new Dictionary<string, string>();
        foreach (var each in Hcn.Endpoints().OrderBy(each => Json.Number(each.Value, "Flags") & 1))
        {
            object on;
            if (!each.Value.TryGetValue("HostComputeNetwork", out on) || !string.Equals((string)on, network, StringComparison.OrdinalIgnoreCase)) continue;
            foreach (var configuration in Json.Items(each.Value, "IpConfigurations").Cast<Document>())
                if (!found.ContainsKey((string)configuration["IpAddress"])) found[(string)configuration["IpAddress"]] = each.Key;
        }
        foreach (var document in bundle.Endpoints)
        {
            var address = AddressOf(document);
            if (found.ContainsKey(address)) continue;
            var id = Create(record.Endpoints, guid => Hcn.CreateEndpoint(network, guid, new Document(document) { { "HostComputeNetwork", network } }));
            found[address] = id;
        }
        return found;
    }

    static string AddressOf(Document endpoint)
    {
        return (string)((Document)Json.Items(endpoint, "IpConfigurations").First())["IpAddress"];
    }

    void BalanceLoad(Bundle bundle, Dictionary<string, string> addresses)
    {
        var stale = new Dictionary<string, string>(); // what HNS has -> its GUID
        foreach (var each in Hcn.LoadBalancers())
        {
            var text = Sorted(each.Value);
            if (!stale.ContainsKey(text) || record.LoadBalancers.Contains(each.Key)) stale[text] = each.Key;
        }
        var missing = new List<Document>();
        foreach (var each in bundle.LoadBalancers)
        {
            var ids = Json.Items(each, "HostComputeEndpoints").Cast<string>().Select(address => Known(addresses, address)).ToArray();
            var document = new Document(each);
            document["HostComputeEndpoints"] = ids;
            if (stale.Remove(Sorted(document))) Kept++;
            else missing.Add(document);
        }
        // Two load balancers cannot have one frontend, so one that has other endpoints now goes just before its successor comes.
        foreach (var document in missing)
        {
            var frontend = Frontend(document);
            foreach (var old in stale.Where(each => record.LoadBalancers.Contains(each.Value) && Frontend(Json.Object(each.Key)) == frontend).ToList())
            {
                Delete(false, old.Value);
                stale.Remove(old.Key);
            }
            Create(record.LoadBalancers, guid => Hcn.CreateLoadBalancer(guid, document));
        }
        foreach (var each in stale.Values)
            if (record.LoadBalancers.Contains(each)) Delete(false, each);
            else Foreign++;
    }

    static string Known(Dictionary<string, string> addresses, string address)
    {
        string id;
        if (!addresses.TryGetValue(address, out id)) throw new Refused(3, "HNS has no endpoint " + address + ", a pod of this node; has its CNI plugin not made it yet?");
        return id;
    }

    // A document as a text that is the same for equal ones: keys and endpoints in order, no ID, GUIDs in small letters.
    static string Sorted(Document document)
    {
        var sorted = new SortedDictionary<string, object>(StringComparer.Ordinal);
        foreach (var each in document.Where(each => each.Key != "ID" && each.Key != "HostComputeEndpoints")) sorted[each.Key] = each.Value;
        sorted["HostComputeEndpoints"] = Json.Items(document, "HostComputeEndpoints").Cast<string>().Select(id => id.ToLowerInvariant()).OrderBy(id => id, StringComparer.Ordinal).ToArray();
        return Json.Text(sorted);
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
        if (dryRun) return id;
        own.Add(id);
        record.Write();
        create(id);
        return id;
    }

    void Delete(bool endpoint, string id)
    {
        Deleted++;
        if (!dryRun) Hcn.Delete(endpoint, id);
    }

    // Take what is gone from the record; only once it is gone.
    void Forget()
    {
        if (dryRun) return;
        record.LoadBalancers.IntersectWith(Hcn.LoadBalancers().Keys);
        record.Endpoints.IntersectWith(Hcn.Endpoints().Keys);
    }
}

public static class AkpNode
{
    const string Usage = "akp-node apply|check DIRECTORY | status | facts | rollback | restore | cleanup";
    const int Keep = 3; // bundles that rollback can reach

    static string state;

    public static int Main(string[] words)
    {
        var answer = new Document { { "verb", words.FirstOrDefault() ?? "" } };
        int code = 0;
        try
        {
            state = Environment.GetEnvironmentVariable("AKP_STATE") ?? Path.Combine(Environment.GetFolderPath(Environment.SpecialFolder.CommonApplicationData), "akp");
            Directory.CreateDirectory(state);
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
        bool takesDirectory = words.Length > 0 && (words[0] == "apply" || words[0] == "check");
        if (words.Length != (takesDirectory ? 2 : 1)) throw new Refused(2, "usage: " + Usage);
        switch (words[0])
        {
            case "apply": Apply(new Bundle(words[1]), record, answer, true); break;
            case "check": Tell(answer, Into(new Bundle(words[1]), record, true), record.Generation); break;
            case "restore": Apply(new Bundle(Kept().LastOrDefault() ?? ""), record, answer, false); break;
            case "rollback": Rollback(record, answer); break;
            case "status": Status(record, answer); break;
            case "facts": Facts(answer); break;
            case "cleanup":
                var host = new Host(record, false);
                host.Clean();
                foreach (var each in Kept()) Directory.Delete(each, true);
                Tell(answer, host, "");
                break;
            default: throw new Refused(2, "usage: " + Usage);
        }
    }

    static Host Into(Bundle bundle, Record record, bool dryRun)
    {
        var host = new Host(record, dryRun);
        host.Become(bundle);
        return host;
    }

    static void Tell(Document answer, Host host, string generation)
    {
        answer["generation"] = generation;
        answer["changed"] = host.Created + host.Deleted > 0;
        answer["created"] = host.Created;
        answer["deleted"] = host.Deleted;
        answer["kept"] = host.Kept;
        answer["foreign"] = host.Foreign;
    }

    // The bundle is kept first, so that restore after a kill goes on with it.
    static void Apply(Bundle bundle, Record record, Document answer, bool keep)
    {
        if (keep) bundle = new Bundle(Keeping(bundle));
        Tell(answer, Into(bundle, record, false), bundle.Generation);
    }

    // Directories of kept bundles, the newest last: their names begin with a number that grows.
    static List<string> Kept()
    {
        return Directory.GetDirectories(state, "bundle-*").Where(each => !each.EndsWith(".new")).OrderBy(each => each, StringComparer.Ordinal).ToList();
    }

    static string Keeping(Bundle bundle)
    {
        var kept = Kept();
        var last = kept.LastOrDefault();
        if (last != null && last.EndsWith("-" + bundle.Generation)) return last;
        int number = last == null ? 1 : int.Parse(Path.GetFileName(last).Split('-')[1]) + 1;
        var target = Path.Combine(state, string.Format("bundle-{0:d9}-{1}", number, bundle.Generation));
        if (Directory.Exists(target + ".new")) Directory.Delete(target + ".new", true);
        Directory.CreateDirectory(target + ".new");
        foreach (var file in Directory.GetFiles(bundle.Directory)) File.Copy(file, Path.Combine(target + ".new", Path.GetFileName(file)));
        Directory.Move(target + ".new", target);
        foreach (var old in kept.Take(Math.Max(0, kept.Count + 1 - Keep))) Directory.Delete(old, true);
        return target;
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
        var host = Into(new Bundle(last), new Record(state), true);
        answer["state"] = host.Created + host.Deleted == 0 ? "applied" : "differs";
        answer["drift"] = host.Created + host.Deleted;
    }

    // What `akp render --facts` reads of a Windows node.
    static void Facts(Document answer)
    {
        var networks = Hcn.Networks();
        var own = Hcn.Endpoints().Where(each => (Json.Number(each.Value, "Flags") & 1) == 0).SelectMany(each => Json.Items(each.Value, "IpConfigurations").Cast<Document>());
        answer["hns"] = new Document { { "endpoints", own.Select(each => (string)each["IpAddress"]).OrderBy(each => each, StringComparer.Ordinal).ToArray() } };
        answer["networks"] = networks.Values.Select(each => new Document { { "Name", each["Name"] }, { "Type", each["Type"] } }).ToArray();
    }
}
