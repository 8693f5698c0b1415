//! Pods whose log shows that a part of their specification counts.

use super::{Case, NOTE};

pub(crate) fn init(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "volumes: [{name: v, emptyDir: {}}],
        initContainers: [
          {name: one, image: IMAGE, command: [sh, -c, 'echo one >/v/f'], volumeMounts: [{name: v, mountPath: /v}]},
          {name: two, image: IMAGE, command: [sh, -c, 'echo two >>/v/f'], volumeMounts: [{name: v, mountPath: /v}]}],
        containers: [{name: c, image: IMAGE, command: [sh, -c, 'cat /v/f'], volumeMounts: [{name: v, mountPath: /v}]}]";
    case.prints(spec, "one\ntwo\n")
}

pub(crate) fn sidecar(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "volumes: [{name: v, emptyDir: {}}],
        initContainers: [{name: s, image: IMAGE, restartPolicy: Always, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'trap exit TERM; echo up >/v/f; while :; do sleep 0.2; done'],
          startupProbe: {exec: {command: [cat, /v/f]}, periodSeconds: 1, failureThreshold: 60}}],
        containers: [{name: c, image: IMAGE, command: [sh, -c, 'cat /v/f'], volumeMounts: [{name: v, mountPath: /v}]}]";
    case.prints(spec, "up\n")
}

pub(crate) fn shared(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "volumes: [{name: v, emptyDir: {}}], containers: [
        {name: s, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'echo page >/v/index.html; httpd -p 127.0.0.1:8080 -h /v; while [ ! -e /v/end ]; do sleep 0.1; done']},
        {name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'until wget -q -O - http://127.0.0.1:8080/; do sleep 0.1; done; touch /v/end']}]";
    case.prints(spec, "page\n")
}

pub(crate) fn memory_dir(case: &Case<'_>) -> anyhow::Result<()> {
    // The agent's tmpfs does not know the limit of the volume (docs/limits.md).
    let spec = "volumes: [{name: v, emptyDir: {medium: Memory, sizeLimit: 8Mi}}],
        containers: [{name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'grep -c \" /v tmpfs \" /proc/mounts; head -c 12582912 /dev/zero >/v/f; wc -c </v/f']}]";
    case.prints(spec, "1\n12582912\n")?;
    println!("{NOTE}memory emptyDir: its sizeLimit of 8 MiB is not applied, 12 MiB fit");
    Ok(())
}

pub(crate) fn downward(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE, command: [sh, -c, 'echo $NAME $SPACE; [ \"$IP\" = \"$(hostname -i)\" ] && echo same'],
        env: [{name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}},
          {name: SPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}},
          {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]}]";
    case.prints(spec, &format!("p {}\nsame\n", case.namespace))
}

pub(crate) fn files(case: &Case<'_>) -> anyhow::Result<()> {
    case.kubectl(&["create", "configmap", "m", "--from-literal=a=alpha", "--from-literal=b=beta"])?;
    case.kubectl(&["create", "secret", "generic", "s", "--from-literal=key=hidden"])?;
    let spec = "volumes: [{name: m, configMap: {name: m}}, {name: s, secret: {secretName: s, defaultMode: 256}}],
        containers: [{name: c, image: IMAGE,
          command: [sh, -c, 'cat /m/a; echo; cat /only-b; echo; cat /s/key; echo; stat -L -c %a /s/key'],
          volumeMounts: [{name: m, mountPath: /m}, {name: m, mountPath: /only-b, subPath: b}, {name: s, mountPath: /s}]}]";
    case.prints(spec, "alpha\nbeta\nhidden\n400\n")
}

pub(crate) fn token(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE, command: [sh, -c,
        'cd /var/run/secrets/kubernetes.io/serviceaccount && ls && cut -d. -f1 token | base64 -d 2>/dev/null | grep -c alg']}]";
    case.prints(spec, "ca.crt\nnamespace\ntoken\n1\n")
}

pub(crate) fn users(case: &Case<'_>) -> anyhow::Result<()> {
    let spec =
        "securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000, supplementalGroups: [3000]},
        volumes: [{name: v, emptyDir: {}}],
        containers: [{name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'id -u; id -g; id -G; touch /v/f; stat -c %g /v/f']}]";
    case.prints(spec, "1000\n1000\n1000 2000 3000\n2000\n")
}

pub(crate) fn read_only(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "volumes: [{name: v, emptyDir: {}}],
        containers: [{name: c, image: IMAGE, securityContext: {readOnlyRootFilesystem: true},
          volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'touch /f 2>/dev/null || echo refused; touch /v/f && echo written']}]";
    case.prints(spec, "refused\nwritten\n")
}

pub(crate) fn capabilities(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "containers: [{name: c, image: IMAGE,
        securityContext: {capabilities: {drop: [ALL], add: [NET_BIND_SERVICE]}},
        command: [sh, -c, 'grep CapBnd /proc/self/status']}]";
    case.prints(spec, "CapBnd:\t0000000000000400\n")
}

pub(crate) fn sysctl(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: '80'}]},
        containers: [{name: c, image: IMAGE, command: [sh, -c, 'cat /proc/sys/net/ipv4/ip_unprivileged_port_start']}]";
    case.prints(spec, "80\n")
}

pub(crate) fn names(case: &Case<'_>) -> anyhow::Result<()> {
    let spec =
        "hostname: named, subdomain: sub, hostAliases: [{ip: 10.1.2.3, hostnames: [alias]}], dnsPolicy: None,
        dnsConfig: {nameservers: [10.9.9.9], searches: [example.org], options: [{name: ndots, value: '3'}]},
        containers: [{name: c, image: IMAGE, command: [sh, -c,
          'hostname; grep -c \"10.1.2.3.*alias\" /etc/hosts; cat /etc/resolv.conf']}]";
    case.prints(spec, "named\n1\nsearch example.org\nnameserver 10.9.9.9\noptions ndots:3\n")
}

pub(crate) fn processes(case: &Case<'_>) -> anyhow::Result<()> {
    let spec = "shareProcessNamespace: true, volumes: [{name: v, emptyDir: {}}], containers: [
        {name: s, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'while [ ! -e /v/end ]; do sleep 0.1; done; true marker']},
        {name: c, image: IMAGE, volumeMounts: [{name: v, mountPath: /v}],
          command: [sh, -c, 'until ps | grep -q \"[t]rue marker\"; do sleep 0.1; done; touch /v/end; echo seen']}]";
    case.prints(spec, "seen\n")
}
