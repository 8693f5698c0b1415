# Lists the node's state, one line for each thing. $1 is the folder of the node's programs. Left out are the state folder
# of Peerpod, which a removal keeps, and what control plane, kubelet and containerd keep by themselves. So are the files
# of Kata's Go shim: it leaves its socket for each pod in /run/containerd/s, and after a SIGKILL its folders in /run/vc
# and /run/kata-containers. Their mounts count. So are the folder of Peerpod's sockets when it is empty except for the
# relay's lock, and files of the CSI example's own pods: sockets of the driver and its registrar, kubelet's folder of its
# volumes, and the mount point that runc makes in the host's /dev for a privileged container.
set -euo pipefail
ip -o link | awk -F': ' '{ sub("@.*", "", $2); print "interface " $2 }'
# A bridge that is made again has another link-local address.
for family in -4 -6; do
    ip $family route show table all | sed -E 's/ *$//; s/^/route /; s/fe80::[0-9a-f:]+ /fe80:: /; s/ linkdown//'
    ip $family rule | sed 's/^/rule /'
done
# kube-proxy's own table has a chain for each Service.
nft list chains | awk '$1 == "table" { table = $2 " " $3 } $1 == "chain" { print "chain " table " " $2 }' |
    grep -v kube-proxy || true
nft list tables | sed 's/^/nft /'
tc qdisc show | sed 's/ [0-9a-f]*: dev / dev /; s/ refcnt.*//'
find /run/netns -type f | sed 's/^/network namespace /'
awk '{ print "mount " $5 }' /proc/self/mountinfo
sysctl -a 2>/dev/null | grep -E '^net\.(ipv4\.(ip_forward|conf\.(all|default)\.)|ipv6\.conf\.(all|default)\.)' |
    sed 's/^/setting /'
losetup -l -n -O BACK-FILE | sed -n "s|^$1|loop device &|p"
find /etc /opt /run /var/lib /var/log /srv /usr/local /usr/libexec -xdev \
    \( -path /var/lib/peerpod -o -path /run/lib -o -path /run/log -o -path /run/containerd \
    -o -path /run/vc -o -path /run/kata-containers \) -prune \
    -o -path /run/peerpod -o -path /run/peerpod/pods -o -path /run/peerpod/stops -o -path /run/peerpod/relay.lock \
    -o -path /run/dev/termination-log -o -printf 'file %p\n' 2>/dev/null || true
# /var/lib/kubelet and the folders of the node's programs are file systems or folders of their own. The tests' clock is in
# memory, which a reboot empties. kubelet records pulled images.
for folder in /run/containerd /var/lib/kubelet "$1"/{kubelet,run,cni,ipam,plugins}; do
    [ ! -d "$folder" ] || find "$folder" -xdev \( -path /run/containerd/s -o -path "$1/run/clock" \) -prune \
        -o -path '/var/lib/kubelet/image_manager/pulled/*' \
        -o -path /var/lib/kubelet/plugins/csi-hostpath -o -path /var/lib/kubelet/plugins/csi-hostpath/csi.sock \
        -o -path /var/lib/kubelet/plugins/kubernetes.io -o -path /var/lib/kubelet/plugins/kubernetes.io/csi \
        -o -path /var/lib/kubelet/plugins/kubernetes.io/csi/hostpath.csi.k8s.io \
        -o -path /var/lib/kubelet/plugins_registry/hostpath.csi.k8s.io-reg.sock \
        -o -printf 'file %p\n' 2>/dev/null || true
done
