{{/* Contradictions that the schema cannot see. */}}
{{- define "hotswap.checks" -}}
{{- $v := .Values }}
{{- if and (eq $v.clusterTls.mode "existingSecret") (not $v.clusterTls.existingSecret) }}
{{- fail "clusterTls.existingSecret: name the secret with tls.crt, tls.key and ca.crt, or set clusterTls.mode to certManager" }}
{{- end }}
{{- if and (eq $v.gateway.tls.mode "existingSecret") (not $v.gateway.tls.existingSecret) }}
{{- fail "gateway.tls.existingSecret: name the secret with tls.crt and tls.key" }}
{{- end }}
{{- if and (not $v.etcd.enabled) (not $v.externalStore.endpoints) }}
{{- fail "externalStore.endpoints: name the members of your etcd, or set etcd.enabled" }}
{{- end }}
{{- if and (ne $v.trainer.mode "none") (not $v.trainer.config) }}
{{- fail "trainer.config: give the trainer's configuration; trainer/configs has examples" }}
{{- end }}
{{- if eq $v.trainer.mode "colocated" }}
{{- if or (ne (int $v.rollout.replicas) 1) (ne $v.rollout.kind "StatefulSet") }}
{{- fail "trainer.mode colocated: there is one trainer, so set rollout.replicas to 1 and rollout.kind to StatefulSet" }}
{{- end }}
{{- if and $v.rollout.gpus (not $v.rollout.deviceClass) }}
{{- fail "rollout.deviceClass: two containers share GPUs by a claim only; name the device class, e.g. gpu.nvidia.com" }}
{{- end }}
{{- end }}
{{- if and (eq $v.rollout.kind "StatefulSet") (ne (int $v.rollout.groupSize) 1) }}
{{- fail "rollout.groupSize: an instance over several pods needs rollout.kind LeaderWorkerSet" }}
{{- end }}
{{- end }}
