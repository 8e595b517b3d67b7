{{/* Names, labels, and what all pods have in common. */}}

{{- define "hotswap.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The labels of pods, (dict "root" $ "component" NAME). Versions are left to "hotswap.labels": pods whose labels change
start anew, and a Job cannot change its own. */}}
{{- define "hotswap.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "hotswap.labels" -}}
{{ include "hotswap.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "hotswap.meta" -}}
name: {{ include "hotswap.fullname" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "hotswap.labels" . | nindent 2 }}
{{- end }}

{{/* The number of pods; (dict "root" $ "values" of it "api" VERSION "kind" KIND "name" NAME). With an autoscaler it is the
present one: if an upgrade leaves the number out, the API makes it 1. A first install leaves it to the autoscaler. */}}
{{- define "hotswap.replicas" -}}
{{- if not .values.autoscaling.enabled -}}
replicas: {{ .values.replicas }}
{{- else -}}
{{- with lookup .api .kind .root.Release.Namespace .name -}}
replicas: {{ dig "spec" "replicas" 1 . }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A quantity as a number. */}}
{{- define "hotswap.number" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1000 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[a-zA-Z]+$" (toString .) -}}
{{- mulf (trimSuffix $unit (toString .) | float64) (get $units $unit | float64) -}}
{{- end }}

{{/* A list of variables in which the user's take the place of the chart's; (dict "base" TEXT "extra" [...]) */}}
{{- define "hotswap.withEnv" -}}
{{- $names := list -}}
{{- range .extra }}{{ $names = append $names .name }}{{ end -}}
{{- $kept := list -}}
{{- range fromYamlArray .base -}}
{{- if not (has .name $names) }}{{ $kept = append $kept . }}{{ end -}}
{{- end -}}
{{- toYaml (concat $kept (.extra | default list)) -}}
{{- end }}

{{/* The name of a map that never changes: pods of an older revision, and a Job that runs, keep theirs.
(dict "root" $ "name" NAME "data" TEXT) */}}
{{- define "hotswap.mapName" -}}
{{ include "hotswap.fullname" .root }}-{{ .name }}-{{ sha256sum .data | trunc 8 }}
{{- end }}

{{- define "hotswap.map" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "hotswap.mapName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "hotswap.labels" . | nindent 4 }}
  annotations: {helm.sh/resource-policy: keep}
immutable: true
data:
  {{- .data | nindent 2 }}
{{- end }}

{{- define "hotswap.scriptsMap" -}}
{{- include .as (dict "root" .root "component" "common" "name" "scripts" "data" (.root.Files.Glob "files/*.py").AsConfig) -}}
{{- end }}

{{- define "hotswap.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* The head of every pod's spec: no privileges, and no way to the API server. */}}
{{- define "hotswap.pod" -}}
serviceAccountName: {{ include "hotswap.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "hotswap.locked" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Replicas on different hosts and zones where it can be; (dict "root" $ "component" NAME "values" of it) */}}
{{- define "hotswap.placement" -}}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "hotswap.selector" $ | nindent 8 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "hotswap.clusterTlsSecret" -}}
{{ ternary .Values.clusterTls.existingSecret (printf "%s-cluster-tls" (include "hotswap.fullname" .)) (eq .Values.clusterTls.mode "existingSecret") }}
{{- end }}

{{- define "hotswap.gatewayTlsSecret" -}}
{{ ternary .Values.gateway.tls.existingSecret (printf "%s-gateway-tls" (include "hotswap.fullname" .)) (eq .Values.gateway.tls.mode "existingSecret") }}
{{- end }}

{{- define "hotswap.adminSecret" -}}
{{ default (printf "%s-admin" (include "hotswap.fullname" .)) .Values.adminKey.existingSecret }}
{{- end }}

{{/* host:port of etcd's members, comma-separated */}}
{{- define "hotswap.etcdHosts" -}}
{{- if .Values.etcd.enabled -}}
{{- $name := printf "%s-etcd" (include "hotswap.fullname" .) -}}
{{- $hosts := list -}}
{{- range $i := until (int .Values.etcd.members) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s.%s.svc:2379" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $hosts -}}
{{- else -}}
{{- join "," .Values.externalStore.endpoints -}}
{{- end -}}
{{- end }}

{{/* Whether etcd asks for users: a role for each kind of process (weightsync/store/etcd_roles.py). */}}
{{- define "hotswap.etcdUsers" -}}
{{ if or .Values.etcd.enabled .Values.externalStore.authSecret }}yes{{ end }}
{{- end }}

{{- define "hotswap.etcdAuthSecret" -}}
{{- $own := default (printf "%s-etcd-auth" (include "hotswap.fullname" .)) .Values.etcd.auth.existingSecret -}}
{{ ternary $own .Values.externalStore.authSecret .Values.etcd.enabled }}
{{- end }}

{{- define "hotswap.etcdTlsSecret" -}}
{{- $own := default (printf "%s-etcd-client-tls" (include "hotswap.fullname" .)) .Values.etcd.tls.clientSecret -}}
{{ ternary $own .Values.externalStore.tlsSecret .Values.etcd.enabled }}
{{- end }}

{{/* The store's URL: where it is, and in which files certificates and password are. (dict "root" $ "role" NAME) */}}
{{- define "hotswap.store" -}}
{{- $e := .root.Values.externalStore -}}
{{- $own := .root.Values.etcd.enabled -}}
{{- $options := list -}}
{{- if include "hotswap.etcdTlsSecret" .root -}}
{{- $options = append $options "ca=/etc/hotswap/etcd-tls/ca.crt" -}}
{{- if or $own $e.clientCertificate -}}
{{- $options = concat $options (list "cert=/etc/hotswap/etcd-tls/tls.crt" "key=/etc/hotswap/etcd-tls/tls.key") -}}
{{- end -}}
{{- end -}}
{{- if and .role (include "hotswap.etcdUsers" .root) -}}
{{- $options = concat $options (list (printf "user=%s" .role) (printf "password_file=/etc/hotswap/etcd-auth/%s" .role)) -}}
{{- end -}}
etcd://{{ include "hotswap.etcdHosts" .root }}/{{ ternary "hotswap" $e.namespace $own }}{{ if $options }}?{{ join "&" $options }}{{ end }}
{{- end }}

{{/* What every process of ours finds in its environment, and where. (dict "root" $ "role" NAME) */}}
{{- define "hotswap.env" -}}
- {name: HOTSWAP_STORE, value: {{ include "hotswap.store" . | quote }}}
- {name: HOTSWAP_CLUSTER_TLS, value: /etc/hotswap/cluster-tls}
# Everything that libraries cache goes to the one place that may be written to.
- {name: HOME, value: /tmp}
{{- end }}

{{- define "hotswap.mounts" -}}
- {name: cluster-tls, mountPath: /etc/hotswap/cluster-tls, readOnly: true}
- {name: scripts, mountPath: /etc/hotswap/scripts, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "hotswap.etcdTlsSecret" .root }}
- {name: etcd-tls, mountPath: /etc/hotswap/etcd-tls, readOnly: true}
{{- end }}
{{- if include "hotswap.etcdUsers" .root }}
- {name: etcd-auth-{{ .role }}, mountPath: /etc/hotswap/etcd-auth, readOnly: true}
{{- end }}
{{- end }}

{{/* The place for temporary files of a pod, as large as its container's limit lets it be. (resources) */}}
{{- define "hotswap.tmp" -}}
- name: tmp
  emptyDir: {{ with get .limits "ephemeral-storage" }}{sizeLimit: {{ . }}}{{ else }}{}{{ end }}
{{- end }}

{{/* (dict "root" $ "roles" [NAME...] "resources" of the container that the pod is for) */}}
{{- define "hotswap.volumes" -}}
- name: cluster-tls
  secret: {secretName: {{ include "hotswap.clusterTlsSecret" .root }}, defaultMode: 0440}
- name: scripts
  configMap: {name: {{ include "hotswap.scriptsMap" (dict "root" .root "as" "hotswap.mapName") }}}
{{ include "hotswap.tmp" .resources }}
{{- with include "hotswap.etcdTlsSecret" .root }}
- name: etcd-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if include "hotswap.etcdUsers" .root }}
{{- range .roles }}
- name: etcd-auth-{{ . }}
  secret:
    secretName: {{ include "hotswap.etcdAuthSecret" $.root }}
    defaultMode: 0440
    items: [{key: {{ . }}, path: {{ . }}}]
{{- end }}
{{- end }}
{{- end }}

{{- define "hotswap.adminKeyEnv" -}}
- name: HOTSWAP_ADMIN_KEY
  valueFrom:
    secretKeyRef: {name: {{ include "hotswap.adminSecret" . }}, key: {{ .Values.adminKey.key }}}
{{- end }}

{{/* What carries versions between pods. Without RDMA devices `auto` is tcp, whatever devices of the host a pod may see. */}}
{{- define "hotswap.peerTransport" -}}
{{- $v := .Values -}}
{{- $rdma := or (ne (toString $v.rollout.rdma) "0") (ne (toString $v.trainer.rdma) "0") -}}
{{- if and (eq $v.peer.transport "auto") (not $rdma) }}tcp{{ else }}{{ $v.peer.transport }}{{ end -}}
{{- end }}

{{/* The ports that pods with a peer use with each other: those of the peer, if nothing chooses its own. Else nothing. */}}
{{- define "hotswap.peerPorts" -}}
{{- if and (eq (include "hotswap.peerTransport" .) "tcp") (eq (int .Values.rollout.groupSize) 1) -}}
ports: [{port: 8003}, {port: {{ .Values.peer.dataPort }}}]
{{- end -}}
{{- end }}
