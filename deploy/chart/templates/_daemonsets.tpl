{{- /* Node and relay. Rendered as they are, or into a ConfigMap from which the controller applies them (rollout.mode). */ -}}
{{- define "peerpod.nodeDaemonSet" -}}
{{- $v := .Values -}}
{{- $part := dict "root" . "component" "node" -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $v.name }}-node
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "peerpod.labels" $part | nindent 4 }}
  {{- with $v.node.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "peerpod.selector" $part | nindent 6 }}
  # The new one starts, claims the node's capacity, and waits for the old one to leave: what is missing meanwhile is the
  # time of one start, and no pod notices.
  updateStrategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: 1
      maxUnavailable: 0
  minReadySeconds: 5
  template:
    metadata:
      labels:
        {{- include "peerpod.labels" $part | nindent 8 }}
        {{- with $v.node.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        # A changed configuration is a rolling update.
        peerpod.io/config: {{ include "peerpod.config" . | sha256sum }}
        {{- with include "peerpod.references" . }}
        peerpod.io/references: {{ . | trim | quote }}
        {{- end }}
        {{- with $v.node.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ $v.name }}-node
      automountServiceAccountToken: true
      {{- include "peerpod.pullSecrets" . | nindent 6 }}
      # Variables of Services would be taken for settings.
      enableServiceLinks: false
      # Pods' network namespaces are below the node's own; no port is declared, because two pods of one node share them
      # during an update.
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      priorityClassName: {{ $v.priorityClass.node }}
      terminationGracePeriodSeconds: {{ $v.node.terminationGracePeriodSeconds }}
      nodeSelector:
        {{- toYaml $v.nodeSelector | nindent 8 }}
      tolerations:
        {{- toYaml $v.node.tolerations | nindent 8 }}
      {{- with $v.node.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- with include "peerpod.confinement" $part }}
        {{- trim . | nindent 8 }}
        {{- end }}
        # It enters network namespaces, which are root's.
        runAsUser: 0
        runAsGroup: 0
        seccompProfile:
          type: {{ if $v.node.privileged }}Unconfined{{ else }}RuntimeDefault{{ end }}
      containers:
        - name: node
          image: {{ include "peerpod.image" (dict "root" . "tag" $v.node.tag) }}
          imagePullPolicy: {{ $v.image.pullPolicy }}
          command: [/usr/bin/peerpod-node]
          env:
            - name: PEERPOD_CLUSTER_NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            - name: PEERPOD_CLUSTER_POD_UID
              valueFrom: {fieldRef: {fieldPath: metadata.uid}}
            {{- with concat $v.provider.env $v.node.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          envFrom:
            {{- include "peerpod.envFrom" . | nindent 12 }}
          securityContext:
            readOnlyRootFilesystem: true
            {{- if $v.node.privileged }}
            privileged: true
            {{- else }}
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
              add:
                {{- toYaml $v.node.capabilities | nindent 16 }}
            {{- end }}
          # On the node's own loopback, by which the kubelet asks.
          startupProbe:
            httpGet: {host: 127.0.0.1, port: 15153, path: /healthz}
            periodSeconds: 2
            failureThreshold: 90
          readinessProbe:
            httpGet: {host: 127.0.0.1, port: 15153, path: /readyz}
            periodSeconds: 5
          livenessProbe:
            httpGet: {host: 127.0.0.1, port: 15153, path: /healthz}
            periodSeconds: 20
            timeoutSeconds: 5
            failureThreshold: 6
          resources:
            {{- toYaml $v.node.resources | nindent 12 }}
          volumeMounts:
            - name: config
              mountPath: /etc/peerpod/peerpod.yaml
              subPath: peerpod.yaml
              readOnly: true
            - name: run
              mountPath: {{ $v.paths.run }}
            - name: state
              mountPath: {{ $v.paths.state }}
            # Those that the container runtime makes later appear here, too.
            - name: netns
              mountPath: {{ $v.paths.netns }}
              mountPropagation: HostToContainer
              readOnly: true
            # Where CSI drivers that know Kata describe volumes; the path is Kata's own.
            - name: direct-volumes
              mountPath: /run/kata-containers/shared/direct-volumes
              readOnly: true
            {{- include "peerpod.podFolderMounts" (dict "root" . "kubelet" $v.paths.kubelet) | nindent 12 }}
            {{- if ne (include "peerpod.tunnelKind" .) "vxlan" }}
            # The encrypted tunnel's device is opened here; the relay gets the descriptor.
            - name: tun
              mountPath: /dev/net/tun
            {{- end }}
            - name: tmp
              mountPath: /tmp
            {{- if $v.pullSecrets.enabled }}
            - name: secrets-token
              mountPath: /var/run/secrets/peerpod
              readOnly: true
            - name: secrets-ca
              mountPath: /etc/peerpod/secrets
              readOnly: true
            {{- end }}
            {{- include "peerpod.providerMount" . | nindent 12 }}
            {{- with $v.node.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: config
          configMap:
            name: {{ $v.name }}-config
        - name: run
          hostPath: {path: {{ $v.paths.run }}, type: DirectoryOrCreate}
        - name: state
          hostPath: {path: {{ $v.paths.state }}, type: DirectoryOrCreate}
        - name: netns
          hostPath: {path: {{ $v.paths.netns }}, type: DirectoryOrCreate}
        - name: direct-volumes
          hostPath: {path: /run/kata-containers/shared/direct-volumes, type: DirectoryOrCreate}
        {{- include "peerpod.podFolderVolumes" (dict "root" . "kubelet" $v.paths.kubelet) | nindent 8 }}
        {{- if ne (include "peerpod.tunnelKind" .) "vxlan" }}
        - name: tun
          hostPath: {path: /dev/net/tun, type: CharDevice}
        {{- end }}
        - name: tmp
          emptyDir: {sizeLimit: 64Mi}
        {{- if $v.pullSecrets.enabled }}
        # Says to the service of pull secrets which node asks, and is good for nothing else.
        - name: secrets-token
          projected:
            defaultMode: 256 # 0400
            sources:
              - serviceAccountToken:
                  audience: peerpod-secrets
                  expirationSeconds: 3600
                  path: token
        # The controller makes it.
        - name: secrets-ca
          configMap:
            name: {{ $v.name }}-secrets-ca
            optional: true
        {{- end }}
        {{- include "peerpod.providerVolume" . | nindent 8 }}
        {{- with $v.node.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}

{{- define "peerpod.relayDaemonSet" -}}
{{- $v := .Values -}}
{{- $part := dict "root" . "component" "relay" -}}
{{- $folders := dict "root" . "kubelet" (printf "%s/pods" $v.paths.kubelet) -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $v.name }}-relay
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "peerpod.labels" $part | nindent 4 }}
  {{- with $v.relay.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "peerpod.selector" $part | nindent 6 }}
  # What runs is never stopped for what is new: either nothing happens to it, or the new one is started beside it and
  # takes its sockets and connections over.
  updateStrategy:
    type: {{ $v.relay.updateStrategy }}
    {{- if eq $v.relay.updateStrategy "RollingUpdate" }}
    rollingUpdate:
      maxSurge: 1
      maxUnavailable: 0
    {{- end }}
  # The old pod goes so long after the new one answers; a take-over needs a quarter of a second.
  minReadySeconds: 10
  template:
    metadata:
      labels:
        {{- include "peerpod.selector" $part | nindent 8 }}
        app.kubernetes.io/instance: {{ .Release.Name }}
        {{- with $v.relay.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $v.relay.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      # It faces hostile guests: no way to the API server.
      serviceAccountName: {{ $v.name }}-relay
      automountServiceAccountToken: false
      {{- include "peerpod.pullSecrets" . | nindent 6 }}
      enableServiceLinks: false
      # VMs dial the node's address. No port is declared: old and new share them during a take-over.
      hostNetwork: true
      dnsPolicy: Default
      priorityClassName: {{ $v.priorityClass.node }}
      terminationGracePeriodSeconds: {{ $v.relay.terminationGracePeriodSeconds }}
      nodeSelector:
        {{- toYaml $v.nodeSelector | nindent 8 }}
      tolerations:
        {{- toYaml $v.relay.tolerations | nindent 8 }}
      {{- with $v.relay.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- with include "peerpod.confinement" $part }}
        {{- trim . | nindent 8 }}
        {{- end }}
        # Shares folders with peerpod-node that are nobody else's, and reads containers' bundles, which are root's alone.
        # No capability, its own system call filter, and Landlock for all other files.
        runAsUser: 0
        runAsGroup: 0
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: relay
          image: {{ include "peerpod.image" (dict "root" . "tag" $v.relay.tag) }}
          imagePullPolicy: {{ $v.image.pullPolicy }}
          command: [/usr/bin/peerpod-relay]
          env:
            # One whose place was taken waits for its pod's end: started again it would take over in its turn.
            - name: PEERPOD_RELAY_REPLACED
              value: wait
            # One that cannot take over says so in an Event of its pod, by way of the node's daemon.
            - name: POD_NAMESPACE
              valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_UID
              valueFrom: {fieldRef: {fieldPath: metadata.uid}}
            - name: PEERPOD_RELAY_POD
              value: $(POD_NAMESPACE)/$(POD_NAME)/$(POD_UID)
            {{- $bundles := join "," $v.paths.bundles }}
            {{- if ne $bundles "/run/containerd/io.containerd.runtime.v2.task" }}
            # Not in the shared file: a relay of an older release reads that at a restart, and would refuse the key.
            - name: PEERPOD_RELAY_BUNDLES
              value: {{ $bundles }}
            {{- end }}
            {{- with $v.relay.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          # `kubectl describe pod` shows why the program ended.
          terminationMessagePolicy: FallbackToLogsOnError
          {{- include "peerpod.confined" . | nindent 10 }}
          # Answered for the relay of the node, whichever process that is. Whether it is ready is the node's matter: an
          # old one that is not would be deleted before the new one has its connections. And nothing kills a relay that
          # answers late: its pods would die.
          readinessProbe:
            httpGet: {host: 127.0.0.1, port: 15152, path: /healthz}
            periodSeconds: 5
            failureThreshold: 6
          resources:
            {{- toYaml $v.relay.resources | nindent 12 }}
          volumeMounts:
            - name: config
              mountPath: /etc/peerpod/peerpod.yaml
              subPath: peerpod.yaml
              readOnly: true
            - name: run
              mountPath: {{ $v.paths.run }}
            # Of the state these alone: the rest has the node's keys.
            - name: state-relay
              mountPath: {{ $v.paths.state }}/relay
            - name: state-inbox
              mountPath: {{ $v.paths.state }}/inbox
            {{- include "peerpod.podFolderMounts" $folders | nindent 12 }}
      volumes:
        - name: config
          configMap:
            name: {{ $v.name }}-config
        - name: run
          hostPath: {path: {{ $v.paths.run }}, type: DirectoryOrCreate}
        - name: state-relay
          hostPath: {path: {{ $v.paths.state }}/relay, type: DirectoryOrCreate}
        - name: state-inbox
          hostPath: {path: {{ $v.paths.state }}/inbox, type: DirectoryOrCreate}
        {{- include "peerpod.podFolderVolumes" $folders | nindent 8 }}
{{- end }}

{{- define "peerpod.tunnelKind" -}}
{{- dig "tunnel" "kind" "vxlan" .Values.config -}}
{{- end }}

{{- /* Where containers' specifications and volumes' targets are: at the same paths as on the node, because they are named by
these, and with what is mounted there later. */ -}}
{{- define "peerpod.podFolderMounts" -}}
- name: kubelet
  mountPath: {{ .kubelet }}
  mountPropagation: HostToContainer
  readOnly: true
{{- range $i, $path := .root.Values.paths.bundles }}
- name: bundles-{{ $i }}
  mountPath: {{ $path }}
  mountPropagation: HostToContainer
  readOnly: true
{{- end }}
{{- end }}

{{- define "peerpod.podFolderVolumes" -}}
- name: kubelet
  hostPath: {path: {{ .kubelet }}, type: Directory}
{{- range $i, $path := .root.Values.paths.bundles }}
# A container runtime that has started nothing yet has not made it.
- name: bundles-{{ $i }}
  hostPath: {path: {{ $path }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}

{{- define "peerpod.clusterPriority" -}}
{{- if .Values.priorityClass.create }}{{ .Values.name }}-cluster{{ else }}system-cluster-critical{{ end -}}
{{- end }}

{{- define "peerpod.runtimeClass" -}}
{{- $class := .Values.runtimeClass -}}
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: {{ $class.name }}
  labels:
    {{- include "peerpod.labels" (dict "root" . "component" "runtime") | nindent 4 }}
handler: {{ $class.handler }}
overhead:
  podFixed:
    {{- toYaml $class.overhead | nindent 4 }}
scheduling:
  nodeSelector:
    {{- toYaml .Values.nodeSelector | nindent 4 }}
  {{- with $class.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
