{{/*
The name of all. KubeRay takes names of at most 47 characters for a RayJob; a RayCronJob's RayJobs are named after it,
with up to 12 more, and it is called NAME-nightly.
*/}}
{{- define "swiftbatch.name" -}}
{{- .Release.Name | trunc 27 | trimSuffix "-" -}}
{{- end }}

{{- define "swiftbatch.image" -}}
{{- .Values.image.repository }}:{{ .Values.image.tag -}}
{{- end }}

{{/* Labels of an object that Kueue is to admit. */}}
{{- define "swiftbatch.queued" -}}
{{- with .Values.queueName }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* An object's metadata behind `name`, where it has labels of the user's alone. */}}
{{- define "swiftbatch.labels" -}}
{{- with .Values.labels }}
labels:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A pod's labels: the part of it that network policies, budgets and monitors select. */}}
{{- define "swiftbatch.podLabels" -}}
app.kubernetes.io/part-of: {{ include "swiftbatch.name" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "swiftbatch.inbox" -}}
{{- if .Values.inboxConfigMap }}/inbox{{ else }}{{ .Values.store.bucket | default "/store" | trimSuffix "/" }}/inbox{{ end }}
{{- end }}

{{/* What every command is given. Nobody is there to say --takeover at night; a driver that is heard of is never overtaken. */}}
{{- define "swiftbatch.options" -}}
--address 127.0.0.1:6379 --model {{ .Values.model }} --device {{ ternary "cuda" "cpu" (gt (int .Values.workers.gpus) 0) }}
{{- printf " --threads %v --workers %v --slots %v" .Values.workers.cpu .Values.workers.max .Values.slots }}
{{- printf " --grace-seconds %v --metrics-port 9400 --takeover" .Values.graceSeconds }}
{{- with .Values.deadline }} --deadline {{ . }}{{ end }}
{{- with .Values.options }} {{ . }}{{ end }}
{{- end }}
