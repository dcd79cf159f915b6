{{- define "swiftbatch.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
{{- if .ownsStore }}
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

{{- define "swiftbatch.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pod that hands a command to Ray and shows its lines. */}}
{{- define "swiftbatch.submitter" -}}
metadata:
  labels:
    {{- include "swiftbatch.podLabels" (dict "root" .root "component" "submit") | nindent 4 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "swiftbatch.name" .root }}-submit
  {{- include "swiftbatch.pullSecrets" .root | nindent 2 }}
  securityContext:
    {{- include "swiftbatch.podSecurity" (dict "ownsStore" false) | nindent 4 }}
  containers:
    - name: {{ .container }}
      image: {{ include "swiftbatch.image" .root }}
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

{{/* What a Ray container is beside its name, ports, resources and probes. */}}
{{- define "swiftbatch.rayContainer" -}}
image: {{ include "swiftbatch.image" . }}
command: [/bin/bash, -c, --]
# `ray start` itself has to be process 1: SIGTERM makes it drain the node, and a shell in front would swallow it
args: ['ulimit -n 65536; exec /bin/bash -c "exec $KUBERAY_GEN_RAY_START_CMD"']
env:
  - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
    value: {{ add .Values.graceSeconds 10 | quote }}
  - { name: RAY_worker_niceness, value: "0" } # 15 by default: a neighbour would come first
{{- if .Values.store.bucket }}
envFrom:
  - secretRef: { name: {{ .Values.store.secret }} }
{{- end }}
livenessProbe:
  httpGet: { path: /api/local_raylet_healthz, port: 52365 }
  initialDelaySeconds: 60
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 8
securityContext:
  {{- include "swiftbatch.confined" . | nindent 2 }}
{{- end }}

{{- define "swiftbatch.mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: home, mountPath: /home/swiftbatch }
{{- if not .Values.store.bucket }}
- { name: store, mountPath: /store }
{{- end }}
{{- end }}

{{- define "swiftbatch.volumes" -}}
- { name: tmp, emptyDir: { sizeLimit: 20Gi } }
- { name: home, emptyDir: { sizeLimit: 50Gi } }
{{- if not .Values.store.bucket }}
- name: store
  persistentVolumeClaim:
    claimName: {{ include "swiftbatch.name" . }}-store
{{- end }}
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
