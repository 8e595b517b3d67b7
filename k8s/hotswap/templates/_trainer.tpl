{{/* The trainer's container. (dict "root" $ "once" BOOL): once it has succeeded, it stays instead of starting over. */}}
{{- define "hotswap.trainer" -}}
{{- $t := .root.Values.trainer -}}
- name: trainer
  {{- include "hotswap.image" .root | nindent 2 }}
  # tini passes the kubelet's SIGTERM on, on which the ranks save, and takes away what rewards' dead processes leave.
  command: [tini, --, python, {{ if .once }}/etc/hotswap/scripts/run_once.py, python, {{ end }}-m, trainer.main]
  args: [--config=/etc/hotswap/trainer/config.yaml]
  env:
    {{- $parts := list (include "hotswap.env" (dict "root" .root "role" "trainer")) (include "hotswap.hostEnv" .root) (include "hotswap.adminKeyEnv" .root) }}
    {{- include "hotswap.withEnv" (dict "base" (join "\n" $parts) "extra" $t.extraEnv) | nindent 4 }}
  {{- if .once }}
  resources:
    {{- if .root.Values.rollout.deviceClass }}
    {{- include "hotswap.resources" (dict "resources" $t.resources "claims" (list (dict "name" "gpus"))) | nindent 4 }}
    {{- else }}
    {{- toYaml $t.resources | nindent 4 }}
    {{- end }}
  {{- else }}
  resources: {{- include "hotswap.resources" (dict "resources" $t.resources "devices" (dict $t.gpuResource $t.gpus)) | nindent 4 }}
  {{- end }}
  {{- include "hotswap.locked" .root | nindent 2 }}
  volumeMounts:
    {{- include "hotswap.mounts" (dict "root" .root "role" "trainer") | nindent 4 }}
    {{- include "hotswap.hostMounts" .root | nindent 4 }}
    - {name: trainer-config, mountPath: /etc/hotswap/trainer, readOnly: true}
    - {name: output, mountPath: /output}
    {{- if $t.apiKey.existingSecret }}
    - {name: api-key, mountPath: /etc/hotswap/api-key, readOnly: true}
    {{- end }}
    {{- with $t.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if ne .root.Values.gateway.tls.mode "none" }}
    - {name: gateway-ca, mountPath: /etc/hotswap/gateway-ca, readOnly: true}
    {{- end }}
{{- end }}

{{/* The configuration, with the addresses of this release's gateway where a section leaves them out. */}}
{{- define "hotswap.trainerMap" -}}
{{- $config := deepCopy .root.Values.trainer.config -}}
{{- $name := include "hotswap.fullname" .root -}}
{{- $scheme := ternary "http" "https" (eq .root.Values.gateway.tls.mode "none") -}}
{{- if kindIs "map" $config.gateway -}}
{{- $_ := merge $config.gateway (dict "url" (printf "%s://%s-gateway" $scheme $name)) -}}
{{- end -}}
{{- range list $config.telemetry ($config.memory | default dict).serving -}}
{{- if kindIs "map" . -}}
{{- $_ := merge . (dict "admin_url" (printf "https://%s-admin:8002" $name)) -}}
{{- end -}}
{{- end -}}
{{- $data := printf "config.yaml: |\n%s" (toYaml $config | indent 2) -}}
{{- include .as (dict "root" .root "component" "trainer" "name" (printf "trainer-%s" .root.Values.trainer.run) "data" $data) -}}
{{- end }}

{{- define "hotswap.trainerVolumes" -}}
- name: trainer-config
  configMap: {name: {{ include "hotswap.trainerMap" (dict "root" . "as" "hotswap.mapName") }}}
- name: output
  {{- toYaml .Values.trainer.output | nindent 2 }}
{{- with .Values.trainer.apiKey }}
{{- if .existingSecret }}
- name: api-key
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .key }}, path: api.key}]
{{- end }}
{{- end }}
{{- with .Values.trainer.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- if ne .Values.gateway.tls.mode "none" }}
- name: gateway-ca
  secret:
    secretName: {{ include "hotswap.gatewayTlsSecret" . }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
    optional: true  # a secret of your own may be without it, where a public authority has signed
{{- end }}
{{- end }}
