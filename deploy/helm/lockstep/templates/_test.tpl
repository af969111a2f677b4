{{/* A test pod up to its containers: (list ROOT CELL END_OF_NAME). */}}
{{- define "lockstep.testPod" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ $cell.prefix }}-{{ index . 2 }}
  labels:
    {{- include "lockstep.labels" (list $root $cell "test") | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation
spec:
  {{- include "lockstep.commonPod" (dict "root" $root "cell" $cell) | nindent 2 }}
  restartPolicy: Never
{{- end }}

{{/* The rest of its container: CELL. */}}
{{- define "lockstep.testMounts" -}}
resources:
  requests: {cpu: 500m, memory: 512Mi}
  limits: {cpu: 500m, memory: 512Mi}
{{- if not .tls.insecure }}
volumeMounts:
  {{- include "lockstep.tlsMount" . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Its volumes: CELL. */}}
{{- define "lockstep.testVolumes" -}}
{{- if not .tls.insecure }}
volumes:
  - name: tls
    secret:
      secretName: {{ include "lockstep.tlsSecret" (list . "tokenizer") | quote }}
      defaultMode: 0440
      # No key: what clients trust, and nothing else.
      items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}
