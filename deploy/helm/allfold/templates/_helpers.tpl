{{/* The name of one of our images: (dict "root" $ "image" .Values.images.agent "suffix" "-cuda13"). */}}
{{- define "allfold.image" -}}
{{- $registry := .root.Values.images.registry | trimSuffix "/" -}}
{{- $tag := .image.tag | default (printf "%s%s" .root.Chart.AppVersion (.suffix | default "")) -}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ .image.repository }}:{{ $tag }}
{{- end }}

{{- define "allfold.agentImage" -}}
{{- $suffix := ternary (printf "-%s" .Values.gpu.cuda) "" .Values.gpu.enabled -}}
{{- include "allfold.image" (dict "root" . "image" .Values.images.agent "suffix" $suffix) }}
{{- end }}

{{/* What a pod has whoever runs in it: (dict "root" $ "user" 10001). */}}
{{- define "allfold.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.priorityClass.name }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What no container may do. */}}
{{- define "allfold.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "allfold.scheme" -}}
{{ ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{/*
How a probe asks a service: (dict "root" $ "path" "/readyz" "port" "http" "variable" "ALLFOLD_..."). The
kubelet has no client certificate, so with TLS a program in the container asks, which has one.
*/}}
{{- define "allfold.probe" -}}
{{- if .root.Values.tls.enabled -}}
exec: {command: [python, -IS, /opt/allfold/ready.py, {{ .variable }}, {{ .path }}]}
{{- else -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
{{- end }}
{{- end }}

{{/* Pods of ours as a peer of a network policy. */}}
{{- define "allfold.peer" -}}
{podSelector: {matchLabels: {app.kubernetes.io/name: {{ . }}}}}
{{- end }}

{{/* The hosts of the Redis servers that Sentinel watches. */}}
{{- define "allfold.redisHosts" -}}
redis-0.redis redis-1.redis redis-2.redis
{{- end }}

{{/* The URL of the store; $(REDIS_PASSWORD) is for Kubernetes to fill in. */}}
{{- define "allfold.redisUrl" -}}
{{- if eq .Values.redis.mode "external" -}}
{{ .Values.redis.external.url }}
{{- else if eq .Values.redis.mode "sentinel" -}}
{{- $sentinels := list }}
{{- range splitList " " (include "allfold.redisHosts" .) }}
{{- $sentinels = append $sentinels (printf "%s:26379" .) }}
{{- end -}}
redis+sentinel://:$(REDIS_PASSWORD)@{{ join "," $sentinels }}/allfold/0?sentinel_password=$(REDIS_PASSWORD)
{{- else -}}
redis://:$(REDIS_PASSWORD)@redis:6379/0
{{- end }}
{{- end }}
