# Runs a program ($1) as a machine of its own: in cgroups of its own, which no other process has, and in namespaces of
# its own. The kernel kills all its processes when it ends. The kernel settings that kubelet changes are restored, also after
# a signal. Fails if something is left.
set -eu
name=peerpod-node-$$
settings="vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys
    kernel.keys.root_maxbytes"
before=$(sysctl $settings)
folders=$(for procs in /sys/fs/cgroup/*/cgroup.procs; do dirname "$procs"; done)
restore() {
    code=$?
    trap - EXIT
    set +e
    for folder in $folders; do
        [ -d "$folder/$name" ] || continue
        echo $$ >"$folder/cgroup.procs"
        find "$folder/$name" -depth -type d -exec rmdir {} + || code=1
    done
    echo "$before" | sed 's/ = /=/' | while read -r setting; do sysctl -q "$setting"; done
    [ "$(sysctl $settings)" = "$before" ] || { echo "the kernel settings are not as before" >&2; code=1; }
    exit "$code"
}
trap restore EXIT
trap 'exit 1' HUP INT TERM
for folder in $folders; do
    mkdir "$folder/$name"
    if [ -e "$folder/cpuset.cpus" ]; then
        echo 1 >"$folder/$name/cgroup.clone_children"
        for file in cpuset.cpus cpuset.mems; do cat "$folder/$file" >"$folder/$name/$file"; done
    fi
    echo $$ >"$folder/$name/cgroup.procs"
done
# The shell reaps the processes that lose their parent.
unshare --mount --uts --ipc --net --pid --cgroup --fork --kill-child --mount-proc \
    sh -c '"$0" & wait $!' "$1"
