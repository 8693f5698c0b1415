# Makes the namespaces of the test's process those of a node of its own: files, devices, cgroups and the host name.
# Everything is in memory and ends with the process. The caller is the first process of all these namespaces.
set -eu
controllers=$(awk '$(NF - 2) == "cgroup" { n = split($5, part, "/"); print part[n] }' /proc/self/mountinfo)
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs tmpfs /tmp
# Kata's Go shim needs /dev/log, which the machine must not get.
mkdir -p /run/lock /run/netns /run/dev
cp -ax /dev/. /run/dev/
for folder in pts shm mqueue; do
    [ ! -d "/dev/$folder" ] || { mkdir -p "/run/dev/$folder" && mount --rbind "/dev/$folder" "/run/dev/$folder"; }
done
mount --rbind /run/dev /dev
# Kata's programs, and the container runtime's configuration.
mount -t tmpfs -o mode=755 tmpfs /opt
mount -t tmpfs -o mode=755 tmpfs /etc/containerd
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
for controller in $controllers; do
    mkdir "/sys/fs/cgroup/$controller"
    options=$controller
    [ "$controller" != systemd ] || options=none,name=systemd
    mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$controller"
done
# The chart's folders, and nothing that the machine keeps.
for folder in lib log; do
    mkdir -p "/run/$folder/upper" "/run/$folder/work"
    mount -t overlay -o "lowerdir=/var/$folder,upperdir=/run/$folder/upper,workdir=/run/$folder/work" overlay "/var/$folder"
done
mkdir -p /var/lib/kubelet /var/lib/peerpod
mount -t tmpfs tmpfs /var/lib/kubelet
mount -t tmpfs tmpfs /var/lib/peerpod
# Containers see later mounts, as those of CNI and kubelet.
mount --make-rshared /
hostname worker-1
