{{/*
The name of all. KubeRay takes names of at most 47 characters for a RayJob; a RayCronJob's RayJobs are named after it,
with up to 12 more, and it is called NAME-nightly.
*/}}
{{- define "swiftbatch.name" -}}
{{- .Release.Name | trunc 27 | trimSuffix "-" -}}
{{- end }}

{{/* An object's metadata: the `suffix` of its name, and `labels` beside those that all have, as text. */}}
{{- define "swiftbatch.metadata" -}}
name: {{ include "swiftbatch.name" .root }}{{ .suffix }}
labels:
  {{- include "swiftbatch.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "swiftbatch.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The label of an object that Kueue is to admit. */}}
{{- define "swiftbatch.queue" -}}
{{- with .Values.queueName }}kueue.x-k8s.io/queue-name: {{ . }}{{ end }}
{{- end }}

{{/* What network policies, budgets and services select: all pods, or those of one component. */}}
{{- define "swiftbatch.selector" -}}
app.kubernetes.io/part-of: {{ include "swiftbatch.name" .root }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "swiftbatch.inbox" -}}
{{- if .Values.inboxConfigMap }}/inbox{{ else }}{{ .Values.store.bucket | default "/store" | trimSuffix "/" }}/inbox{{ end }}
{{- end }}

{{/* What every command and the server are given. A GPU worker finds out itself how many jobs fit. */}}
{{- define "swiftbatch.workOptions" -}}
{{- $hasGpu := gt (int .Values.workers.gpus) 0 -}}
--model {{ .Values.model }} --device {{ ternary "cuda" "cpu" $hasGpu }}
{{- printf " --threads %v --workers %v" .Values.workers.cpu .Values.workers.max }}
{{- if $hasGpu }} --gpus-per-worker {{ .Values.workers.gpus }}{{ end }}
{{- with .Values.slots | default (ternary nil 4 $hasGpu) }} --slots {{ . }}{{ end }}
{{- printf " --grace-seconds %v" .Values.graceSeconds }}
{{- end }}

{{/* Nobody is there to say --takeover at night; a driver that is heard of is never overtaken. */}}
{{- define "swiftbatch.options" -}}
--address 127.0.0.1:6379 {{ include "swiftbatch.workOptions" . }} --metrics-port 9400 --takeover
{{- with .Values.deadline }} --deadline {{ . }}{{ end }}
{{- with .Values.options }} {{ . }}{{ end }}
{{- end }}
