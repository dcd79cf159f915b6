{{- define "swiftbatch.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
{{- if .ownsVolumes }}
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "swiftbatch.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "swiftbatch.podLabels" -}}
{{- include "swiftbatch.selector" . }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "swiftbatch.image" -}}
{{- with .Values.image }}
image: {{ .repository }}{{ ternary (printf ":%s" .tag) (printf "@%s" .digest) (empty .digest) }}
{{- with .pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Who a pod is, and on which nodes it may be, by the `values` of head or workers. */}}
{{- define "swiftbatch.placement" -}}
serviceAccountName: {{ include "swiftbatch.name" .root }}-{{ .component }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- $product := dict }}
{{- with .values.gpuProduct }}
{{- $product = dict "nvidia.com/gpu.product" . }}
{{- end }}
{{- with merge $product .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pod that hands a command to Ray and shows its lines. It may be where the head may be. */}}
{{- define "swiftbatch.submitter" -}}
{{- $pod := dict "root" .root "component" "submit" "values" .root.Values.head }}
metadata:
  labels:
    {{- include "swiftbatch.podLabels" $pod | nindent 4 }}
  {{- with .root.Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  {{- include "swiftbatch.placement" $pod | nindent 2 }}
  securityContext:
    {{- include "swiftbatch.podSecurity" (dict "ownsVolumes" false) | nindent 4 }}
  containers:
    - name: {{ .container }}
      {{- include "swiftbatch.image" .root | nindent 6 }}
      {{- with .command }}
      {{- . | nindent 6 }}
      {{- end }}
      envFrom:
        - configMapRef:
            name: {{ include "swiftbatch.name" .root }}-settings
      {{- with .env }}
      env:
        {{- . | nindent 8 }}
      {{- end }}
      resources:
        requests:
          cpu: 250m
          memory: 512Mi
        limits:
          memory: 1Gi
      securityContext:
        {{- include "swiftbatch.confined" .root | nindent 8 }}
      volumeMounts:
        - { name: tmp, mountPath: /tmp }
        - { name: home, mountPath: /home/swiftbatch }
  volumes:
    - { name: tmp, emptyDir: {} }
    - { name: home, emptyDir: {} }
{{- end }}

{{/* Variables of a head, worker or server: more as text in `env`, and the user's last. */}}
{{- define "swiftbatch.environment" -}}
env:
  {{- with .env }}
  {{- . | nindent 2 }}
  {{- end }}
  - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
    value: {{ add .root.Values.graceSeconds 10 | quote }}
  - { name: RAY_worker_niceness, value: "0" } # 15 by default: a neighbour would come first
  {{- if ne .root.Values.modelCache.type "none" }}
  - { name: HF_HUB_CACHE, value: /models }
  {{- end }}
  {{- with .root.Values.hf.secret }}
  - { name: HF_TOKEN, valueFrom: { secretKeyRef: { name: {{ . }}, key: HF_TOKEN } } }
  {{- end }}
  {{- if ne .component "worker" }}
  {{- with .root.Values.webhook.secret }}
  - { name: SWIFTBATCH_WEBHOOK_SECRET, valueFrom: { secretKeyRef: { name: {{ . }}, key: secret } } }
  {{- end }}
  {{- end }}
  {{- with .root.Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $sources := .root.Values.envFrom }}
{{- with .root.Values.store }}
{{- if and .bucket .secret }}
{{- $sources = prepend $sources (dict "secretRef" (dict "name" .secret)) }}
{{- end }}
{{- end }}
{{- with $sources }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "swiftbatch.resources" -}}
{{- $limits := dict "memory" .memory }}
{{- with .gpus }}
{{- $_ := set $limits "nvidia.com/gpu" (toString .) }}
{{- end }}
{{- $requests := merge (dict "cpu" (toString .cpu)) $limits }}
{{- with .ephemeralStorage }}
{{- $_ := set $requests "ephemeral-storage" . }}
{{- end }}
resources:
  requests:
    {{- toYaml $requests | nindent 4 }}
  limits:
    {{- toYaml $limits | nindent 4 }}
{{- end }}

{{/* A head that goes takes all workers along, a server its drivers: no autoscaler of nodes moves them. */}}
{{- define "swiftbatch.unmoved" -}}
karpenter.sh/do-not-disrupt: "true"
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
{{- end }}

{{/* Where head, worker and server, the `component`, have their volumes. */}}
{{- define "swiftbatch.mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: home, mountPath: /home/swiftbatch }
{{- if ne .root.Values.modelCache.type "none" }}
- { name: models, mountPath: /models }
{{- end }}
{{- if not .root.Values.store.bucket }}
- { name: store, mountPath: /store }
{{- end }}
{{- if and (eq .component "head") .root.Values.inboxConfigMap }}
- { name: inbox, mountPath: /inbox, readOnly: true }
{{- end }}
{{- end }}

{{/* These volumes; `values` has the size of home, and `tmp`, where that is not the one of all. */}}
{{- define "swiftbatch.volumes" -}}
{{- $name := include "swiftbatch.name" .root }}
{{- with .root.Values }}
{{- $tmp := merge (dict "type" "emptyDir") ($.tmp | default .tmp) }}
{{- include "swiftbatch.volume" (dict "name" "tmp" "values" $tmp) }}
{{ include "swiftbatch.volume" (dict "name" "home" "values" $.values.home) }}
{{- if ne .modelCache.type "none" }}
{{ include "swiftbatch.volume" (dict "name" "models" "values" .modelCache "claim" (printf "%s-models" $name)) }}
{{- end }}
{{- if not .store.bucket }}
- { name: store, persistentVolumeClaim: { claimName: {{ $name }}-store } }
{{- end }}
{{- if and (eq $.component "head") .inboxConfigMap }}
- { name: inbox, configMap: { name: {{ .inboxConfigMap }} } }
{{- end }}
{{- end }}
{{- end }}

{{/* A pod's volume, of the `type` that its `values` say; `claim` is ours where they name none. */}}
{{- define "swiftbatch.volume" -}}
- name: {{ .name }}
{{- with .values }}
  {{- if eq .type "claim" }}
  persistentVolumeClaim: { claimName: {{ .existingClaim | default $.claim }} }
  {{- else if eq .type "hostPath" }}
  hostPath: { path: {{ .hostPath }}, type: Directory }
  {{- else if eq .type "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "swiftbatch.claim" (dict "values" . "accessMode" "ReadWriteOnce") | nindent 8 }}
  {{- else }}
  emptyDir: { sizeLimit: {{ .size }} }
  {{- end }}
{{- end }}
{{- end }}

{{- define "swiftbatch.claim" -}}
accessModes: [{{ .accessMode }}]
{{- with .values.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .values.size }}
{{- end }}

{{- define "swiftbatch.nightlyCommand" -}}
command: [/bin/bash, -c, --]
# The settings are expanded here: Ray hands the words on as they are, to a shell beside the driver. There exit code 3,
# a limit that was reached, is none to try again for: the next night goes on.
args:
  - exec ray job submit --address http://{{ include "swiftbatch.name" . }}-head-svc:8265 --
    swiftbatch nightly $SWIFTBATCH_INBOX --runs $SWIFTBATCH_RUNS --if-busy wait $SWIFTBATCH_OPTIONS
    '||' test '$?' = 3
{{- end }}

{{- define "swiftbatch.token" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: # KubeRay makes it, with the cluster's name
      name: {{ include "swiftbatch.name" . }}
      key: auth_token
{{- end }}
