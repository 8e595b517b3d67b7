{{/* The pod of two sidecars: instance and peer over one shared memory, and the trainer where it is colocated. */}}

{{/* How the processes of one pod find each other's slots. HOTSWAP_HOST is this pod's name among all. */}}
{{- define "hotswap.hostEnv" -}}
- name: HOTSWAP_HOST
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOTSWAP_ARENA, value: /dev/shm/hotswap}
{{- end }}

{{- define "hotswap.hostMounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}

{{/* (dict "root" $ "sharedMemory" SIZE) */}}
{{- define "hotswap.hostVolumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
- name: model
  {{- toYaml .root.Values.model.volume | nindent 2 }}
{{- end }}

{{/* An exec probe: the kubelet has no certificate of the cluster. (dict "what" started|alive|ready "port" N "path" PATH
"at" the variable with the address, unless it is this pod's) */}}
{{- define "hotswap.exec" -}}
exec:
  command: [python, -I, /etc/hotswap/scripts/probe.py, {{ .what }}, "{{ .port }}", {{ .path }}{{ with .at }}, {{ . }}{{ end }}]
timeoutSeconds: 10
{{- end }}

{{/* The checkpoint engine's side towards other pods; it starts before, and ends after, whoever uses its slots.
     (dict "root" $ "rdma" N "rdmaResource" NAME) */}}
{{- define "hotswap.peer" -}}
- name: peer
  {{- include "hotswap.image" .root | nindent 2 }}
  restartPolicy: Always
  args:
    - peer
    - --model={{ .root.Values.model.name }}
    - --listen=$(POD_IP):8003  # where others reach it, also for the data: transports tell it on
    - --advertise=$(POD_IP):8003
    - --transport={{ include "hotswap.peerTransport" .root }}
    - --data-port={{ .root.Values.peer.dataPort }}
    {{- range .root.Values.peer.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- $base := printf "%s\n%s" (include "hotswap.env" (dict "root" .root "role" "peer")) (include "hotswap.hostEnv" .root) }}
    {{- include "hotswap.withEnv" (dict "base" $base "extra" .root.Values.peer.extraEnv) | nindent 4 }}
  ports:
    - {name: peer, containerPort: 8003}
    - {name: peer-data, containerPort: {{ .root.Values.peer.dataPort }}}
  startupProbe:
    {{- include "hotswap.exec" (dict "what" "started" "port" 8003 "path" "/healthz") | nindent 4 }}
    periodSeconds: 2
    failureThreshold: 60
  livenessProbe:
    {{- include "hotswap.exec" (dict "what" "started" "port" 8003 "path" "/healthz") | nindent 4 }}
    periodSeconds: 20
    failureThreshold: 6
  resources: {{- include "hotswap.resources" (dict "resources" .root.Values.peer.resources "devices" (dict .rdmaResource .rdma)) | nindent 4 }}
  {{- include "hotswap.locked" .root | nindent 2 }}
  volumeMounts:
    {{- include "hotswap.mounts" (dict "root" .root "role" "peer") | nindent 4 }}
    {{- include "hotswap.hostMounts" .root | nindent 4 }}
{{- end }}

{{/* Resources with devices, which have to be in requests and limits alike.
     (dict "resources" R "devices" {name: count} "claims" [name...]) */}}
{{- define "hotswap.resources" -}}
{{- $r := deepCopy .resources -}}
{{- range $name, $count := .devices -}}
{{- if ne (toString $count) "0" -}}
{{- $_ := set $r "requests" (merge (dict $name (toString $count)) ($r.requests | default dict)) -}}
{{- $_ := set $r "limits" (merge (dict $name (toString $count)) ($r.limits | default dict)) -}}
{{- end -}}
{{- end -}}
{{- if .claims -}}
{{- $_ := set $r "claims" .claims -}}
{{- end -}}
{{- toYaml $r -}}
{{- end }}

{{/* The RDMA devices of the peer, out of the pod's. In an instance over several pods NCCL has the others. */}}
{{- define "hotswap.peerRdma" -}}
{{- ternary (min .Values.peer.rdma .Values.rollout.rdma) .Values.rollout.rdma (gt (int .Values.rollout.groupSize) 1) -}}
{{- end }}

{{- define "hotswap.instanceResources" -}}
{{- $r := .Values.rollout -}}
{{- $devices := deepCopy $r.hugepages -}}
{{- $devices = merge $devices (dict $r.rdmaResource (sub $r.rdma (include "hotswap.peerRdma" .))) -}}
{{- if $r.deviceClass -}}
{{- include "hotswap.resources" (dict "resources" $r.resources "devices" $devices "claims" (list (dict "name" "gpus"))) -}}
{{- else -}}
{{- include "hotswap.resources" (dict "resources" $r.resources "devices" (merge $devices (dict $r.gpuResource $r.gpus))) -}}
{{- end -}}
{{- end }}

{{- define "hotswap.instanceMounts" -}}
{{- include "hotswap.mounts" (dict "root" . "role" "instance") }}
{{ include "hotswap.hostMounts" . }}
{{- if .Values.rollout.hugepages }}
- {name: hugepages, mountPath: /dev/hugepages}
{{- end }}
{{- with .Values.rollout.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hotswap.claim" -}}
{{ include "hotswap.fullname" . }}-gpus-{{ printf "%v %s" .Values.rollout.gpus .Values.rollout.deviceClass | sha256sum | trunc 8 }}
{{- end }}

{{- define "hotswap.instanceEnv" -}}
{{- include "hotswap.withEnv" (dict "base" (include "hotswap.instanceOwnEnv" .) "extra" .Values.rollout.extraEnv) -}}
{{- end }}

{{- define "hotswap.instanceOwnEnv" -}}
{{- include "hotswap.env" (dict "root" . "role" "instance") }}
{{ include "hotswap.hostEnv" . }}
- {name: VLLM_CACHE_ROOT, value: /tmp/vllm}
- name: VLLM_HOST_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{/* Options by which vLLM joins the pods of one instance. (dict "root" $ "rank" N) */}}
{{- define "hotswap.groupArgs" -}}
{{- if gt (int .root.Values.rollout.groupSize) 1 }}
- --nnodes={{ .root.Values.rollout.groupSize }}
- --node-rank={{ .rank }}
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port=29500
- --distributed-executor-backend=mp
{{- end }}
{{- end }}

{{/* The same in all pods of one instance, but for the rank. (dict "root" $ "rank" N) */}}
{{- define "hotswap.instanceArgs" -}}
{{- $v := .root.Values -}}
- --model={{ $v.model.path }}
- --name={{ $v.model.name }}
- --host=0.0.0.0
- --advertise=$(POD_IP)
- --port=8001
{{- with $v.rollout.kvCacheGib | default (ternary "" 4 (gt (int $v.rollout.gpus) 0)) }}
- --kv-cache-gib={{ . }}
{{- end }}
- --drain={{ $v.rollout.drain }}
{{- include "hotswap.groupArgs" . }}
{{- range $v.rollout.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* The first instance of all makes the checkpoint the first version, in the memory it will run from. Where there are copies
on disk it restores one, which makes a version active: that is a gateway's right in etcd. It ends before the instance
starts, and no other container of the pod has the gateway's password. (root) */}}
{{- define "hotswap.publish" -}}
{{- $role := ternary "gateway" "trainer" (not (empty .Values.persist.volume)) -}}
- name: publish
  {{- include "hotswap.image" . | nindent 2 }}
  command: [python, /etc/hotswap/scripts/first_version.py]
  args:
    - --model={{ .Values.model.name }}
    - --when={{ .Values.model.publish }}
    - --ordinal=$(ORDINAL)
    {{- if .Values.persist.volume }}
    - --copies=/persist
    {{- end }}
    - {{ .Values.model.path }}
  env:
    {{- include "hotswap.env" (dict "root" . "role" $role) | nindent 4 }}
    {{- include "hotswap.hostEnv" . | nindent 4 }}
    - name: ORDINAL
      valueFrom:
        fieldRef:
          {{- if eq .Values.rollout.kind "StatefulSet" }}
          fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
          {{- else }}
          fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
          {{- end }}
  {{- $requests := dict "cpu" "500m" "memory" "256Mi" "ephemeral-storage" "64Mi" }}
  {{- $needs := dict "requests" $requests "limits" (dict "memory" .Values.peer.resources.limits.memory "ephemeral-storage" "1Gi") }}
  resources: {{- toYaml (.Values.model.publishResources | default $needs) | nindent 4 }}
  {{- include "hotswap.locked" . | nindent 2 }}
  volumeMounts:
    {{- include "hotswap.mounts" (dict "root" . "role" $role) | nindent 4 }}
    {{- include "hotswap.hostMounts" . | nindent 4 }}
    {{- if .Values.persist.volume }}
    - {name: persist, mountPath: /persist}
    {{- end }}
{{- end }}

{{/* Copies committed versions to the volume: one pod of all, which has its lock, while the others wait for it. */}}
{{- define "hotswap.persist" -}}
- name: persist
  {{- include "hotswap.image" . | nindent 2 }}
  restartPolicy: Always
  command: [tini, --, python, -m, weightsync.persist]
  args:
    - --model={{ .Values.model.name }}
    - --dir=/persist
    - --keep={{ .Values.persist.keep }}
  env:
    {{- include "hotswap.env" (dict "root" . "role" "peer") | nindent 4 }}
    {{- include "hotswap.hostEnv" . | nindent 4 }}
  resources: {{- toYaml .Values.persist.resources | nindent 4 }}
  {{- include "hotswap.locked" . | nindent 2 }}
  volumeMounts:
    {{- include "hotswap.mounts" (dict "root" . "role" "peer") | nindent 4 }}
    {{- include "hotswap.hostMounts" . | nindent 4 }}
    - {name: persist, mountPath: /persist}
{{- end }}

{{- define "hotswap.instance" -}}
{{- $r := .Values.rollout -}}
- name: instance
  {{- include "hotswap.image" . | nindent 2 }}
  args:
    - instance
    {{- include "hotswap.instanceArgs" (dict "root" . "rank" 0) | nindent 4 }}
  env:
    {{- include "hotswap.instanceEnv" . | nindent 4 }}
  ports:
    - {name: instance, containerPort: 8001}
  # Started: the engine answers, on dummy weights if need be. Alive: it answers, or it sleeps and does not listen.
  # Ready: it runs a committed version; so a rolling upgrade waits for it, and a disruption budget counts it.
  startupProbe:
    {{- include "hotswap.exec" (dict "what" "started" "port" 8001 "path" "/health") | nindent 4 }}
    periodSeconds: 10
    failureThreshold: {{ max 1 (div $r.startSeconds 10) }}
  livenessProbe:
    {{- include "hotswap.exec" (dict "what" "alive" "port" 8001 "path" "/health") | nindent 4 }}
    periodSeconds: 20
    # An instance that shares its devices wakes by starting anew, which takes as long as a start.
    failureThreshold: {{ ternary (max 6 (div $r.startSeconds 20)) 6 (eq .Values.trainer.mode "colocated") }}
  readinessProbe:
    {{- include "hotswap.exec" (dict "what" "ready" "port" 8001 "path" "/health") | nindent 4 }}
    periodSeconds: 5
    failureThreshold: 3
  resources: {{- include "hotswap.instanceResources" . | nindent 4 }}
  {{- include "hotswap.locked" . | nindent 2 }}
  volumeMounts: {{- include "hotswap.instanceMounts" . | nindent 4 }}
{{- end }}

{{/* Pods 1 and up of an instance over several: vLLM's workers alone, with the options of the leader (docs/multinode.md). */}}
{{- define "hotswap.follower" -}}
- name: follower
  {{- include "hotswap.image" . | nindent 2 }}
  args:
    - instance
    - --headless
    {{- include "hotswap.instanceArgs" (dict "root" . "rank" "$(LWS_WORKER_INDEX)") | nindent 4 }}
  env:
    {{- include "hotswap.instanceEnv" . | nindent 4 }}
  # Ready with its leader. It needs no other probe: a rank that dies, or is cut off, ends the pods of its instance.
  readinessProbe:
    {{- include "hotswap.exec" (dict "what" "ready" "port" 8001 "path" "/health" "at" "LWS_LEADER_ADDRESS") | nindent 4 }}
    periodSeconds: 5
    failureThreshold: 3
  resources: {{- include "hotswap.instanceResources" . | nindent 4 }}
  {{- include "hotswap.locked" . | nindent 2 }}
  volumeMounts: {{- include "hotswap.instanceMounts" . | nindent 4 }}
{{- end }}

{{/* A pod's template. (dict "root" $ "follower" BOOL) */}}
{{- define "hotswap.rolloutPod" -}}
{{- $root := .root -}}
{{- $r := .root.Values.rollout -}}
{{- $c := dict "root" .root "component" "rollout" "values" $r -}}
{{- $colocated := eq .root.Values.trainer.mode "colocated" -}}
{{- $persist := and .root.Values.persist.volume (not .follower) -}}
{{- $first := and (not .follower) (or $persist (ne .root.Values.model.publish "never")) -}}
metadata:
  labels:
    {{- include "hotswap.selector" $c | nindent 4 }}
    hotswap-peer: "true"
  {{- with $r.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "hotswap.pod" .root | nindent 2 }}
  {{- include "hotswap.placement" $c | nindent 2 }}
  # SIGTERM: answers get `drain` to end, others go on with what is left, the engine shuts down, and then the peer.
  {{- $grace := add $r.drain 65 }}
  terminationGracePeriodSeconds: {{ ternary (max $grace (int .root.Values.trainer.graceSeconds)) $grace $colocated }}
  {{- if $r.deviceClass }}
  resourceClaims:
    - {name: gpus, resourceClaimTemplateName: {{ include "hotswap.claim" .root }}}
  {{- end }}
  initContainers:
    {{- include "hotswap.peer" (dict "root" .root "rdma" (include "hotswap.peerRdma" .root) "rdmaResource" $r.rdmaResource) | nindent 4 }}
    {{- if $first }}
    {{- include "hotswap.publish" .root | nindent 4 }}
    {{- end }}
    {{- if $persist }}
    {{- include "hotswap.persist" .root | nindent 4 }}
    {{- end }}
    {{- with $r.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  containers:
    {{- if .follower }}
    {{- include "hotswap.follower" .root | nindent 4 }}
    {{- else }}
    {{- include "hotswap.instance" .root | nindent 4 }}
    {{- end }}
    {{- if $colocated }}
    {{- include "hotswap.trainer" (dict "root" .root "once" true) | nindent 4 }}
    {{- end }}
  volumes:
    {{- $roles := list "peer" "instance" }}
    {{- if or $colocated (and $first (not $persist)) }}
    {{- $roles = append $roles "trainer" }}
    {{- end }}
    {{- if $persist }}
    {{- $roles = append $roles "gateway" }}
    {{- end }}
    {{- include "hotswap.volumes" (dict "root" .root "roles" $roles "resources" $r.resources) | nindent 4 }}
    {{- include "hotswap.hostVolumes" (dict "root" .root "sharedMemory" $r.sharedMemory) | nindent 4 }}
    {{- range $name, $size := $r.hugepages }}
    - name: hugepages
      emptyDir: {medium: {{ $name | replace "hugepages-" "HugePages-" }}}
    {{- end }}
    {{- if $colocated }}
    {{- include "hotswap.trainerVolumes" .root | nindent 4 }}
    {{- end }}
    {{- if $persist }}
    - name: persist
      {{- toYaml .root.Values.persist.volume | nindent 6 }}
    {{- end }}
    {{- with $r.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
