{{- define "peerpod.labels" -}}
app.kubernetes.io/name: peerpod
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Never changes: a DaemonSet's and a Deployment's selector cannot. */ -}}
{{- define "peerpod.selector" -}}
app.kubernetes.io/name: peerpod
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "peerpod.image" -}}
{{- $image := .root.Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (default .root.Chart.AppVersion $image.tag) .tag }}
{{- end -}}
{{- end }}

{{- /* The shared file: what the chart must say, and over it what the user says. */ -}}
{{- define "peerpod.config" -}}
{{- $v := .Values -}}
{{- $classes := list $v.runtimeClass.name -}}
{{- $paths := dict "run-dir" $v.paths.run "state-dir" $v.paths.state -}}
{{- $webhook := dict "runtime-classes" $classes "exclude-namespaces" (include "peerpod.excluded" . | fromJsonArray) -}}
{{- if eq $v.webhook.certificate.source "self-managed" -}}
{{- $_ := set $webhook "certificates" "self-managed" -}}
{{- $_ := set $webhook "ca-secret" (printf "%s-webhook-ca" $v.name) -}}
{{- $_ := set $webhook "registration" (printf "%s-webhook" $v.name) -}}
{{- end -}}
{{- $secrets := dict "serve" false -}}
{{- if and $v.pullSecrets.enabled $v.controller.enabled -}}
{{- $host := printf "%s-secrets.%s.svc" $v.name .Release.Namespace -}}
{{- $secrets = dict "serve" true "address" (printf "%s:9444" $host) -}}
{{- $_ := set $secrets "node-service-account" (printf "%s:%s-node" .Release.Namespace $v.name) -}}
{{- $_ := set $secrets "ca-secret" (printf "%s-secrets-ca" $v.name) -}}
{{- end -}}
{{- $controller := dict -}}
{{- if eq $v.rollout.mode "config" -}}
{{- $hook := ternary (printf "%s-webhook" $v.name) "" $v.webhook.enabled -}}
{{- $controller = dict "rollout-config-map" (printf "%s-rollout" $v.name) "rollout-webhook" $hook -}}
{{- end -}}
{{- $node := dict "netns-dir" $v.paths.netns -}}
{{- if $v.metrics.enabled -}}
{{- $_ := set $node "metrics-listen" "[::]:15157" -}}
{{- end -}}
{{- $ours := dict "paths" $paths "node" $node "webhook" $webhook "controller" $controller "secrets" $secrets "log" (dict "format" "json") -}}
{{- toYaml (mergeOverwrite $ours (deepCopy $v.config)) -}}
{{- end }}

{{- define "peerpod.excluded" -}}
{{- concat (list "kube-system" .Release.Namespace) .Values.webhook.excludeNamespaces | uniq | toJson -}}
{{- end }}

{{- /* Settings as variables. Both may be missing. */ -}}
{{- define "peerpod.envFrom" -}}
- configMapRef:
    name: {{ .Values.provider.configMapName }}
    optional: true
- secretRef:
    name: {{ .Values.provider.secretName }}
    optional: true
{{- end }}

{{- define "peerpod.providerMount" -}}
{{- if .Values.provider.filesSecretName }}
- name: provider
  mountPath: /etc/peerpod/provider
  readOnly: true
{{- end }}
{{- end }}

{{- define "peerpod.providerVolume" -}}
{{- with .Values.provider.filesSecretName }}
- name: provider
  secret:
    secretName: {{ . }}
    defaultMode: 256 # 0400
{{- end }}
{{- end }}

{{- define "peerpod.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Of containers that need nothing of the node. */ -}}
{{- define "peerpod.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- define "peerpod.unprivilegedPod" -}}
securityContext:
  {{- with include "peerpod.confinement" . }}
  {{- trim . | nindent 2 }}
  {{- end }}
  {{- if eq (int .user) 0 }}
  runAsUser: 0
  {{- else }}
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- /* A component's own affinity, or else: replicas on different nodes. */ -}}
{{- define "peerpod.spread" -}}
{{- with (index .root.Values .component).affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- else }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "peerpod.selector" . | nindent 14 }}
{{- end }}
{{- end }}

{{- /* AppArmor and SELinux of a component's pods, in their securityContext. */ -}}
{{- define "peerpod.confinement" -}}
{{- with (index .root.Values .component).appArmorProfile }}
appArmorProfile:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index .root.Values .component).seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Changes with the ConfigMap and the Secrets whose content the pods have as variables and files, so that an upgrade
restarts the pods. Of an object in the cluster it has the version: a hash of a Secret would confirm a guess of the content.
With `provider.secret` each revision of the release is a change, for the same reason. `helm template` asks no cluster, so it
finds no object; an install or upgrade without the right to get them fails. */ -}}
{{- define "peerpod.references" -}}
{{- $p := .Values.provider -}}
{{- $names := list (list "ConfigMap" $p.configMapName) (list "Secret" $p.filesSecretName) -}}
{{- if $p.secret -}}
{{- print "revision/" .Release.Revision " " -}}
{{- else -}}
{{- $names = append $names (list "Secret" $p.secretName) -}}
{{- end -}}
{{- range $names -}}
{{- if last . -}}
{{- with lookup "v1" (first .) $.Release.Namespace (last .) -}}
{{- print .metadata.uid "/" .metadata.resourceVersion " " -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Whether this release makes the RuntimeClass: not one that another release, like kata-deploy's, has made. */ -}}
{{- define "peerpod.ownsRuntimeClass" -}}
{{- if .Values.runtimeClass.create -}}
{{- $found := lookup "node.k8s.io/v1" "RuntimeClass" "" .Values.runtimeClass.name -}}
{{- $of := dig "metadata" "annotations" (dict) $found -}}
{{- $name := index $of "meta.helm.sh/release-name" -}}
{{- $namespace := index $of "meta.helm.sh/release-namespace" -}}
{{- if or (not $found) (and (eq $name .Release.Name) (eq $namespace .Release.Namespace)) -}}
yes
{{- end -}}
{{- end -}}
{{- end }}

{{- define "peerpod.nodeLabels" -}}
{{- $labels := list -}}
{{- range $key, $value := .Values.nodeSelector -}}
{{- $labels = append $labels (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $labels -}}
{{- end }}
